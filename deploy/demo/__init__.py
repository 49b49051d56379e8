"""A small shop, kept in step with four stores, on the embedded stack: python -m deploy.demo."""
