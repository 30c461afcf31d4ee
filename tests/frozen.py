"""Imported last by the process that ranks are copies of: its objects are not searched for garbage again.

Each rank would search hundreds of thousands of objects of torch in its first second, and copy their pages.
"""

import gc

gc.collect()
gc.freeze()
