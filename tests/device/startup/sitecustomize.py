"""In PYTHONPATH, with its parent's folder: a process of this one's gets the pretend device, too."""

import pretend_cuda

pretend_cuda.activate()
