"""`pinnate bench ...`: the flags of each measurement; what is measured is in `pinnate.bench`."""
