"""One run, one directory: how it is made, recorded, stopped and resumed."""
