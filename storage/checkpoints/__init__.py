"""What a stored model is: its files, headers, manifest, tensors and chunks. All of it from a bucket: not trusted."""
