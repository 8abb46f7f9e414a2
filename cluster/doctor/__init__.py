"""`longshore doctor`: what a person would check by hand, each check on its own."""
