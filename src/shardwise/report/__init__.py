"""Plans and runs, shown: a table for a terminal and one page for a browser.

Everything here starts from JSON, a plan's or a run's, and ends in text. What a file does not say is left out or shown
as not known; nothing imports torch.
"""
