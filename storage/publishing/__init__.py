"""Publishing a checkpoint, signing what was published, and reading all of it again."""
