/* Includes for code that reads Python's and NumPy's objects. */
#pragma once
#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <Python.h>
#include <numpy/ndarraytypes.h>
#include "call.h"

int blink_run(call_t *call, int64_t *rows, uint64_t seq);
int blink_execute(call_t *call, int64_t *rows);
