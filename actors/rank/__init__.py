"""One rank's side of a load: lease, fetch, verify, convert, place."""
