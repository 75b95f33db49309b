"""Rules, one file a layer family; `clipper` imports them, which registers them."""
