// Makes the shared library a Python extension, so that wheels and editable installs carry it; the kernels are called
// with ctypes (fxcomp/compressors/kernels.py), not through this module.
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "common.h"

// Raise this, and kernels.py's copy, when a kernel's arguments or a payload's layout change.
FXCOMP_EXPORT int32_t fxcomp_abi_version() { return 16; }

static PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_kernels", nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit__kernels() { return PyModule_Create(&kModule); }
