"""How cdc-sync is run: the local stack, images, manifests. Not part of the wheel."""
