"""The checks of ``gpu_check.py``: what one GPU can show of this library."""
