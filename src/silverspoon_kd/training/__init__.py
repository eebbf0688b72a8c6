"""Distillers on the Trainer of transformers."""
