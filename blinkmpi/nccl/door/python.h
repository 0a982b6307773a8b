/* How the door asks the Python that is in a program's process, if one is: from a thread of its own alone.
 *
 * Nothing here is linked: a program without Python has none of these functions, and must load this library all the same. */
#pragma once
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { FILE_INPUT = 257, CODE = 8192 }; /* Py_file_input */

/* Whether there is an interpreter that can be asked. */
static int python_runs(void) {
  int (*const is_there)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "Py_IsInitialized");
  int (*ends)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "Py_IsFinalizing");
  if (!ends) ends = (int (*)(void))dlsym(RTLD_DEFAULT, "_Py_IsFinalizing"); /* before 3.13 */
  return is_there && is_there() && !(ends && ends());
}

/* Run a text in a namespace of its own; 0 if Python has no way to, or the text raises. */
static int run_python(const char *text) {
  int (*const hold)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
  void (*const let_go)(int) = (void (*)(int))dlsym(RTLD_DEFAULT, "PyGILState_Release");
  void *(*const new_dict)(void) = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyDict_New");
  void *(*const run)(const char *, int, void *, void *) = (void *(*)(const char *, int, void *, void *))dlsym(RTLD_DEFAULT, "PyRun_String");
  void (*const drop)(void *) = (void (*)(void *))dlsym(RTLD_DEFAULT, "Py_DecRef");
  void (*const clear)(void) = (void (*)(void))dlsym(RTLD_DEFAULT, "PyErr_Clear");
  if (!hold || !let_go || !new_dict || !run || !drop || !clear || !python_runs()) return 0;
  const int state = hold();
  void *const names = new_dict(), *const result = names ? run(text, FILE_INPUT, names, names) : NULL;
  if (!result) clear();
  drop(result), drop(names); /* NULL is allowed */
  let_go(state);
  return result != NULL;
}

/* Let blinkmpi in this process serve the library at a path. An empty reason if it does. */
static void ask_python(const char *path, char *reason, size_t bytes) {
  char text[CODE];
  for (const char *c = path; *c; c++)
    if (*c == '\'' || *c == '\\' || *c == '\n') {
      snprintf(reason, bytes, "this library's path has a quote or a backslash: %s", path);
      return;
    }
  const int length = snprintf(text, sizeof text,
                              "try:\n"
                              "    from blinkmpi.nccl.inside import serve\n"
                              "    serve('%s')\n"
                              "except BaseException as error:\n"
                              "    import ctypes, sys\n"
                              "    more = f'; install blinkmpi[cuda13] for {sys.executable}' if isinstance(error, ImportError) else ''\n"
                              "    text = f'{type(error).__name__}: {error}{more}'.encode()[:%zu] + b'\\0'\n"
                              "    ctypes.memmove(%llu, text, len(text))\n",
                              path, bytes - 1, (unsigned long long)(uintptr_t)reason);
  reason[0] = 0;
  if (length >= (int)sizeof text) snprintf(reason, bytes, "this library's path is too long");
  else if (!run_python(text) && !reason[0]) snprintf(reason, bytes, "Python could not be asked");
}
