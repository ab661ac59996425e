"""`farandole check`: three steps of a script under joins, losses and a resume, compared bit for bit with the same steps
alone; and one step in micro-batches of two sizes. `records` says what the processes exchange; import no part from here.
"""
