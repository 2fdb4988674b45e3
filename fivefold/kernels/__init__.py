"""One operator a file: what runs, and the plain reference it is held to."""
