"""The agent's side of a load: the node's chunks, who fetches them, and what is kept of them."""
