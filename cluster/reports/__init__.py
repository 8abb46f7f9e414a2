"""What is told of a load, while it runs and after it."""
