"""The version, for the package, the build and the ranks' agreement."""

VERSION = "0.1.0"
