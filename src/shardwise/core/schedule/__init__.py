"""Units, flats and the order of one step as pure values, with their bytes and their traffic."""
