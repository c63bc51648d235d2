"""Files and batches: /v1/files, /v1/batches, `pinnate run-batch`.

    routes.py, upload.py      HTTP
    batches.py                what a batch goes through, from validating to its end
    lines.py, order.py        what a line must be; in which order lines run
    runner.py                 the requests of one batch, as many at once as the engine has room for
    storage.py                the folder of --data-dir and its one thread
    database.py, tables.py    the database in it

Nothing here is loaded by a server without --data-dir.
"""
