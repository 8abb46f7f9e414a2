"""What tensors are stored as, and what they become on their way in. Pure."""
