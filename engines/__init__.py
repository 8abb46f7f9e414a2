"""What runs inside other programs: tensors that engines read from the store when they copy them. Builds on `actors`."""
