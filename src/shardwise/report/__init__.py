"""Plans and runs, shown: a table for a terminal and one page for a browser.

Everything here turns the JSON of a plan or a run into text. Missing values are left out or shown as unknown. Nothing
imports torch.
"""
