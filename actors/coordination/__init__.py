"""The coordinator's side of a load: its plan, its places, its actors, its life."""
