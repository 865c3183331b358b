"""Training state off the device: in one piece of host memory, and in one file on a disk.

This package stores bytes in named places; it does not know what a parameter or a collective is.
"""
