"""What Python code can reach: followed from a loss function and a model, compared cheaply, searched for leftovers.

code.py    what a function's bytecode names
base.py    what every place tells
calls.py   places that are called: functions, decorators around them, classes, bound methods
places.py  places that only hold: modules, objects, collections
walk.py    from roots to places, as far as traced code can look
watch.py   whether anything that was reached is another object than before
worlds.py  a number for everything that was read: the same again, the same number
keep.py    tensors of the trace that the user's Python kept
draws.py   Python's and NumPy's random numbers while a step is traced
"""
