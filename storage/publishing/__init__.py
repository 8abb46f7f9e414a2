"""Publishing a checkpoint, signing its manifest, and verifying what is stored.

Read `publish` first (the whole flow), then `one_object` (how one file is read, checked and copied), then `signing`
(keys and signatures) and `verify` (reads a published model again).
"""
