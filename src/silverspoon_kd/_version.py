"""The version of the installed distribution; its own module because reading package metadata takes time."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("silverspoon-kd")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"
