"""The HTTP service: a Ray Serve application, its API and the page to look at."""
