"""Moving bytes between ranks: collectives and the ledger that counts them."""
