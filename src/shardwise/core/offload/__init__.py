"""Where training state rests that is not on the device: one piece of host memory, and one file on a disk.

Bytes in named places; nothing here knows what a parameter or a collective is.
"""
