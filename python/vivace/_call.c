/* Calls of operators on tensor objects of a library that has DLPack's C exchange, as torch has from 2.10 on: one call from Python takes them
 * apart, packs the arguments of vivace_OP (vivace/c_api.h) and runs it in the process's context. Built on Python's stable ABI, without
 * headers of torch, and told of the library's functions and the exchange by their addresses. It is optional: what is not taken here is left
 * to _library.Entry.run. */

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#include "vivace/c_api.h"

/* --- the parts of DLPack 1 that are used here, in its layout --- */

enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3, DL_CUDA_MANAGED = 13 };

typedef struct {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} DlTensor;

typedef struct {
  uint32_t major, minor;
  const void* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  /* Borrowed: nothing to free, nothing is waited for. */
  int (*tensor_from_object)(void* object, DlTensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
} DlExchange;

static int32_t dtype_of(const DlTensor* tensor) {
  if (tensor->lanes != 1) return 0;
  switch (tensor->code << 8 | tensor->bits) {
    case 2 << 8 | 32:
      return VIVACE_F32;
    case 2 << 8 | 16:
      return VIVACE_F16;
    case 4 << 8 | 16:
      return VIVACE_BF16;
    case 10 << 8 | 8:
      return VIVACE_FP8_E4M3;
    case 1 << 8 | 8:
    case 6 << 8 | 8:
      return VIVACE_U8;
    case 0 << 8 | 32:
      return VIVACE_I32;
    case 0 << 8 | 64:
      return VIVACE_I64;
    default:
      return 0;
  }
}

/* --- the process's context: a vivace_context, and the object that keeps it. There is one, and so one module of this in a process: a further
 * interpreter, or a second import, does without --- */

static vivace_context* context = NULL;
static PyObject* context_owner = NULL; /* null: there is no context yet */

/* use(address, owner): from the next call on. */
static PyObject* use(PyObject* module, PyObject* args) {
  unsigned long long address;
  PyObject *owner, *before = context_owner;
  (void)module;
  if (!PyArg_ParseTuple(args, "KO", &address, &owner)) return NULL;
  context = (vivace_context*)(uintptr_t)address;
  context_owner = address != 0 ? Py_NewRef(owner) : NULL;
  Py_XDECREF(before);
  Py_RETURN_NONE;
}

/* --- a site: an operator, and the types that are taken apart --- */

enum { MOST_BYTES = 4096, MOST_TYPES = 4, MOST_PARAMETERS = 32, NOT_HERE = -1 };

typedef vivace_code (*Run)(const void* args, const vivace_stream* stream);
typedef vivace_code (*WorkspaceBytes)(const void* args, const vivace_stream* stream, int64_t* bytes);

/* A parameter of the operator's Python function: whether it must not be None, and the neighbouring arguments that it gives, more than one
 * as a tuple. */
typedef struct {
  int required;
  Py_ssize_t first, count;
} Parameter;

typedef struct {
  Run run;
  WorkspaceBytes workspace_bytes;
  const DlExchange* exchange;
  uint64_t args_bytes;
  Py_ssize_t count, workspace; /* arguments, and which of them is a workspace; -1: none */
  char kinds[256];             /* of each: t, i or f */
  uint16_t places[256];        /* of each in the struct */
  PyObject* is_lazy; /* is_lazy(tensor): whether its numbers are others than its memory's; null: never */
  Py_ssize_t type_count;
  PyTypeObject* types[MOST_TYPES];
  Py_ssize_t parameter_count;
  Parameter parameters[MOST_PARAMETERS];
  PyObject* recorders; /* a tuple, each asked whether it records calls; null: bind() was not called yet */
} Site;

static const char* const SITE = "vivace._call.Site";

/* Whether the numbers of `object` are those in its memory. Those of z.conj().imag are not, a view which torch negates when it reads it. Like
 * all parts of complex numbers they are floats at even strides, so that only such tensors are asked. */
static int is_plain(const Site* site, PyObject* object, const vivace_tensor* tensor) {
  const int floats =
      tensor->dtype == VIVACE_F32 || tensor->dtype == VIVACE_F16 || tensor->dtype == VIVACE_BF16;
  if (site->is_lazy == NULL || !floats) return 1;
  for (int i = 0; i < tensor->rank; ++i) {
    if (tensor->shape[i] > 1 && tensor->stride[i] % 2 != 0) return 1;
  }
  PyObject* said = PyObject_CallFunctionObjArgs(site->is_lazy, object, NULL);
  if (said == NULL) return 0;
  const int plain = PyObject_IsTrue(said) == 0;
  Py_DECREF(said);
  return plain;
}

/* Whether `object` is such a tensor; `out` is what it is then. */
static int take_apart(const Site* site, PyObject* object, vivace_tensor* out) {
  Py_ssize_t type = 0;
  while (type < site->type_count && Py_TYPE(object) != site->types[type]) ++type;
  if (type == site->type_count) return 0;
  DlTensor tensor;
  if (site->exchange->tensor_from_object(object, &tensor) != 0) return 0;
  const int cuda = tensor.device_type == DL_CUDA || tensor.device_type == DL_CUDA_MANAGED;
  if (!cuda && tensor.device_type != DL_CPU && tensor.device_type != DL_CUDA_HOST) return 0;
  if (tensor.ndim < 0 || tensor.ndim > VIVACE_MAX_RANK) return 0;
  out->data = (char*)tensor.data + tensor.byte_offset;
  out->dtype = dtype_of(&tensor);
  out->rank = tensor.ndim;
  out->device = cuda ? VIVACE_DEVICE_CUDA : VIVACE_DEVICE_CPU;
  out->ordinal = cuda ? tensor.device_id : 0;
  uint64_t dense = 1; /* beside an extent of 0 the others may be of any size */
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    out->shape[i] = tensor.shape[i];
    out->stride[i] = tensor.strides != NULL ? tensor.strides[i] : (int64_t)dense;
    dense *= (uint64_t)tensor.shape[i];
  }
  return out->dtype != 0 && is_plain(site, object, out);
}

/* Whether `object` is a number that fits: a float, an int or a bool. */
static int pack_number(PyObject* object, char kind, void* out) {
  if (kind == 'f' && PyFloat_CheckExact(object)) {
    *(double*)out = PyFloat_AsDouble(object);
    return 1;
  }
  if (!PyLong_Check(object)) return 0;
  if (kind == 'f') {
    *(double*)out = PyLong_AsDouble(object);
  } else {
    *(int64_t*)out = PyLong_AsLongLong(object);
  }
  return PyErr_Occurred() == NULL;
}

/* Whether `value` became argument `i` of `args`. This may run Python. */
static int pack_value(const Site* site, PyObject* value, Py_ssize_t i, char* args) {
  void* place = args + site->places[i];
  if (site->kinds[i] != 't') return pack_number(value, site->kinds[i], place);
  return value == Py_None || take_apart(site, value, place);
}

/* Whether the stream became the one of the first argument, a tensor. */
static int find_stream(const Site* site, const char* args, vivace_stream* stream) {
  const vivace_tensor* first = (const vivace_tensor*)(args + site->places[0]);
  if (site->kinds[0] != 't' || first->dtype == 0) return 0;
  stream->device = first->device;
  stream->ordinal = first->ordinal;
  return first->device == VIVACE_DEVICE_CPU ||
         site->exchange->current_stream(DL_CUDA, first->ordinal, &stream->handle) == 0;
}

/* The struct, where nothing is given. */
static void begin(const Site* site, char* args) {
  memset(args, 0, site->args_bytes);
  memcpy(args, &site->args_bytes, sizeof(site->args_bytes));
}

/* What vivace_OP returns; NOT_HERE where it needs a workspace that is not `given`, or does not say. */
static vivace_code run(const Site* site, const void* args, const vivace_stream* stream, int given) {
  int64_t needed = 0;
  if (!given && (site->workspace_bytes(args, stream, &needed) != VIVACE_OK || needed != 0)) return NOT_HERE;
  return site->run(args, stream);
}

/* The code of a call that was packed (`packed`: that worked), which ends the exception of a value that is not plain. */
static PyObject* finish(const Site* site, int packed, const char* args, int given) {
  vivace_stream stream = {.context = context};
  vivace_code code = NOT_HERE;
  PyObject* owner = Py_XNewRef(context_owner); /* another may come while this finds its stream and runs */
  if (owner != NULL && packed && find_stream(site, args, &stream)) {
    PyThreadState* state = PyEval_SaveThread();
    code = run(site, args, &stream, given);
    PyEval_RestoreThread(state);
  }
  Py_XDECREF(owner);
  if (PyErr_Occurred() != NULL) { /* of a value that is not plain, or of something else */
    if (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError)) return NULL;
    PyErr_Clear();
  }
  return PyLong_FromLong(code);
}

/* site(values) -> code: NOT_HERE where the values are not all plain; else what vivace_OP returned. */
static PyObject* call(PyObject* capsule, PyObject* values) {
  const Site* site = PyCapsule_GetPointer(capsule, SITE);
  if (site == NULL) return NULL;
  if (!PyTuple_Check(values) || PyTuple_Size(values) != site->count) {
    PyErr_Format(PyExc_TypeError, "vivace._call: needs a tuple of %zd values", site->count);
    return NULL;
  }
  _Alignas(8) char args[MOST_BYTES];
  begin(site, args);
  int packed = 1;
  for (Py_ssize_t i = 0; packed && i < site->count; ++i) {
    packed = pack_value(site, PyTuple_GetItem(values, i), i, args);
  }
  return finish(site, packed, args,
                site->workspace < 0 || PyTuple_GetItem(values, site->workspace) != Py_None);
}

static int pack_parameter(const Site* site, const Parameter* parameter, PyObject* value, char* args) {
  if (parameter->required && value == Py_None) return 0;
  if (parameter->count == 1) return pack_value(site, value, parameter->first, args);
  if (!PyTuple_Check(value) || PyTuple_Size(value) != parameter->count) return 0;
  for (Py_ssize_t i = 0; i < parameter->count; ++i) {
    if (!pack_value(site, PyTuple_GetItem(value, i), parameter->first + i, args)) return 0;
  }
  return 1;
}

/* Whether somebody records calls, who has to be shown another than this; or an exception is set. */
static int is_recorded(const Site* site) {
  int recorded = 0;
  for (Py_ssize_t i = 0; recorded == 0 && i < PyTuple_Size(site->recorders); ++i) {
    PyObject* said = PyObject_CallNoArgs(PyTuple_GetItem(site->recorders, i));
    recorded = said == NULL ? -1 : PyObject_IsTrue(said);
    Py_XDECREF(said);
  }
  return recorded != 0;
}

/* direct(*given) -> code: of all arguments of the operator's Python function that the library knows. */
static PyObject* direct(PyObject* capsule, PyObject* const* given, Py_ssize_t count) {
  const Site* site = PyCapsule_GetPointer(capsule, SITE);
  if (site == NULL) return NULL;
  if (count != site->parameter_count) {
    PyErr_Format(PyExc_TypeError, "vivace._call: needs %zd values", site->parameter_count);
    return NULL;
  }
  _Alignas(8) char args[MOST_BYTES];
  begin(site, args);
  int packed = !is_recorded(site), workspace = site->workspace < 0;
  for (Py_ssize_t i = 0; packed && i < count; ++i) {
    packed = pack_parameter(site, &site->parameters[i], given[i], args);
    workspace |= site->parameters[i].first == site->workspace && given[i] != Py_None;
  }
  return finish(site, packed, args, workspace);
}

static void free_site(PyObject* capsule) {
  Site* site = PyCapsule_GetPointer(capsule, SITE);
  for (Py_ssize_t i = 0; i < site->type_count; ++i) Py_DECREF(site->types[i]);
  Py_XDECREF(site->is_lazy);
  Py_XDECREF(site->recorders);
  PyMem_Free(site);
}

static int fill_site(Site* site, const char* kinds, PyObject* types) {
  site->count = (Py_ssize_t)strlen(kinds);
  site->args_bytes = sizeof(site->args_bytes);
  const Py_ssize_t type_count = PyTuple_Size(types);
  int fits = site->count <= (Py_ssize_t)sizeof(site->kinds) && type_count <= MOST_TYPES;
  for (Py_ssize_t i = 0; fits && i < site->count; ++i) {
    site->places[i] = (uint16_t)site->args_bytes;
    site->args_bytes += kinds[i] == 't' ? sizeof(vivace_tensor) : 8;
    fits = site->args_bytes <= MOST_BYTES;
  }
  if (!fits) {
    PyErr_SetString(PyExc_ValueError,
                    "vivace._call: there are more arguments or types than any operator has");
    return 0;
  }
  if (site->workspace >= site->count || (site->workspace >= 0 && site->workspace_bytes == NULL)) {
    PyErr_SetString(
        PyExc_ValueError,
        "vivace._call: the workspace is no argument, or there is nothing that says how much it needs");
    return 0;
  }
  memcpy(site->kinds, kinds, (size_t)site->count);
  for (; site->type_count < type_count; ++site->type_count) {
    PyObject* type = PyTuple_GetItem(types, site->type_count);
    if (!PyType_Check(type)) {
      PyErr_SetString(PyExc_TypeError, "vivace._call: needs a tuple of types");
      return 0;
    }
    site->types[site->type_count] = (PyTypeObject*)Py_NewRef(type);
  }
  return 1;
}

static PyMethodDef CALL = {"call", call, METH_O, NULL};

/* make(run, workspace_bytes, exchange, kinds, workspace, types, is_lazy) -> site */
static PyObject* make(PyObject* module, PyObject* args) {
  unsigned long long run, workspace_bytes, exchange;
  const char* kinds;
  Py_ssize_t workspace;
  PyObject *types, *is_lazy;
  (void)module;
  if (!PyArg_ParseTuple(args, "KKKsnO!O", &run, &workspace_bytes, &exchange, &kinds, &workspace,
                        &PyTuple_Type, &types, &is_lazy))
    return NULL;
  Site* site = PyMem_Calloc(1, sizeof(Site));
  if (site == NULL) return PyErr_NoMemory();
  site->run = (Run)(uintptr_t)run;
  site->workspace_bytes = (WorkspaceBytes)(uintptr_t)workspace_bytes;
  site->exchange = (const DlExchange*)(uintptr_t)exchange;
  site->workspace = workspace;
  PyObject* capsule = PyCapsule_New(site, SITE, free_site);
  if (capsule == NULL) {
    PyMem_Free(site);
    return NULL;
  }
  site->is_lazy = is_lazy != Py_None ? Py_NewRef(is_lazy) : NULL;
  PyObject* made = fill_site(site, kinds, types) ? PyCFunction_New(&CALL, capsule) : NULL;
  Py_DECREF(capsule);
  return made;
}

/* Adds (required, first, count), or sets an exception. */
static int add_parameter(Site* site, PyObject* described) {
  Parameter made;
  if (!PyTuple_Check(described)) {
    PyErr_SetString(PyExc_TypeError,
                    "vivace._call: a parameter is a tuple: required, first argument, number of them");
    return 0;
  }
  if (!PyArg_ParseTuple(described, "pnn", &made.required, &made.first, &made.count)) return 0;
  if (site->parameter_count == MOST_PARAMETERS || made.first < 0 || made.count < 1 ||
      made.count > site->count - made.first) {
    PyErr_SetString(PyExc_ValueError,
                    "vivace._call: a parameter gives no arguments, or there are more than any operator has");
    return 0;
  }
  site->parameters[site->parameter_count++] = made;
  return 1;
}

static PyMethodDef DIRECT = {"direct", (PyCFunction)(void (*)(void))direct, METH_FASTCALL, NULL};

/* bind(site, parameters, recorders) -> direct, once for a site: parameters are (required, first, count). */
static PyObject* bind(PyObject* module, PyObject* args) {
  PyObject *made, *parameters, *recorders;
  (void)module;
  if (!PyArg_ParseTuple(args, "O!O!O!", &PyCFunction_Type, &made, &PyTuple_Type, &parameters, &PyTuple_Type,
                        &recorders))
    return NULL;
  PyObject* capsule = PyCFunction_GetSelf(made);
  Site* site =
      capsule != NULL && PyCapsule_IsValid(capsule, SITE) ? PyCapsule_GetPointer(capsule, SITE) : NULL;
  if (site == NULL || site->recorders != NULL) {
    PyErr_SetString(PyExc_ValueError, "vivace._call: needs a site that has no parameters");
    return NULL;
  }
  for (Py_ssize_t i = 0; i < PyTuple_Size(parameters); ++i) {
    if (!add_parameter(site, PyTuple_GetItem(parameters, i))) return NULL;
  }
  site->recorders = Py_NewRef(recorders);
  return PyCFunction_New(&DIRECT, capsule);
}

static int load(PyObject* module) {
  static int loaded = 0;
  (void)module;
  if (loaded) {
    PyErr_SetString(PyExc_ImportError, "vivace._call: this process has loaded it already");
    return -1;
  }
  loaded = 1;
  return 0;
}

static PyMethodDef METHODS[] = {{"make", make, METH_VARARGS, NULL},
                                {"bind", bind, METH_VARARGS, NULL},
                                {"use", use, METH_VARARGS, NULL},
                                {NULL, NULL, 0, NULL}};
static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, (void*)load}, {0, NULL}};
static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "vivace._call", NULL, 0, METHODS, SLOTS, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__call(void) {
  return PyModuleDef_Init(&MODULE);
}
