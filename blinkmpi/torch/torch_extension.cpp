/* What torch asks of a call on a stream, in C++: its Work and futures, and the reading of its arguments.
 *
 * In Python they take the host long: torch finds the memory of a future's value by pickling it, and the code that does
 * so is cold each time a bucket of gradients is ready. */
#include <ATen/DLConvertor.h>
#include <ATen/record_function.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace {

using c10::ivalue::Future;
using std::chrono::milliseconds;

constexpr auto POLL = std::chrono::microseconds(200);
constexpr size_t MOST_STREAMS = 64;             /* whose objects are kept */
constexpr int CUDA = 2;                         /* of DLPack, a type of devices */
constexpr auto CAPSULE = "dlpack_exchange_api"; /* of DLPack */

PyObject* timeout_error = nullptr; /* what wait raises; kept */

c10::Event recorded(const c10::Stream& stream) {
  c10::Event event(stream.device_type());
  event.record(stream);
  return event;
}

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

/* A future that is completed by what a stream was given so far; who asks for its value has its own stream wait. */
c10::intrusive_ptr<Future> completed(c10::TypePtr type, const c10::Stream& stream, c10::IValue value,
                                     const std::vector<at::Tensor>& tensors) {
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> memory;
  for (const auto& tensor : tensors) memory.emplace_back(tensor.storage().getWeakStorageImpl());
  auto future = c10::make_intrusive<Future>(std::move(type), std::vector<c10::Device>{stream.device()});
  c10::StreamGuard on(stream);
  future->markCompleted(std::move(value), std::move(memory));
  return future;
}

/* A call on a stream. One `apart` from the current stream has operands that must live until it is through: the first
 * wait gives them back, or they are left to the stream. */
class StreamWork : public c10d::Work {
 public:
  StreamWork(std::vector<at::Tensor> outputs, std::vector<at::Tensor> operands, c10::Stream stream, bool apart)
      : outputs_(std::move(outputs)), stream_(stream) {
    if (!apart) return;
    operands_ = std::move(operands);
    event_.emplace(recorded(stream));
  }

  ~StreamWork() override {
    for (const auto& tensor : operands_) try {
        if (tensor.is_cuda()) tensor.record_stream(stream_);
      } catch (const c10::Error& error) { /* as the process ends, CUDA may have gone */
        TORCH_WARN("memory of a call for which nobody waited: ", error.what_without_backtrace());
      }
  }

  bool isCompleted() override { return isSuccess(); }

  bool isSuccess() const override { return event_ ? event_->query() : stream_.query(); }

  bool wait(milliseconds timeout) override {
    if (event_) event_->block(current_stream(stream_.device()));
    std::vector<at::Tensor> given; /* what the current stream does next, freeing them too, comes behind the call */
    {
      std::lock_guard<std::mutex> one(giving_);
      given.swap(operands_);
    }
    given.clear(); /* which may take Python's lock */
    const auto until = std::chrono::steady_clock::now() + timeout;
    while (timeout.count() > 0 && !isSuccess()) {
      if (std::chrono::steady_clock::now() > until) {
        pybind11::gil_scoped_acquire python;
        PyErr_Format(timeout_error, "wait(%d ms): the call is still under way; wait longer", (int)timeout.count());
        throw pybind11::error_already_set();
      }
      std::this_thread::sleep_for(POLL);
    }
    return true;
  }

  void synchronize() override { wait(kNoTimeout); }

  std::vector<at::Tensor> result() override { return outputs_; }

  c10::intrusive_ptr<Future> getFuture() override {
    return completed(c10::ListType::create(c10::TensorType::get()), stream_, outputs_, outputs_);
  }

 private:
  std::vector<at::Tensor> outputs_, operands_;
  c10::Stream stream_;
  std::optional<c10::Event> event_; /* behind the call, if that is apart */
  std::mutex giving_;
};

/* A call in torch's profiler, while Python is within it; asynchronous, as other backends show theirs. */
class Span {
 public:
  explicit Span(std::string name) : name_(std::move(name)) {}

  void enter() {
    record_.emplace(at::RecordScope::USER_SCOPE);
    if (!record_->isActive()) return;
    record_->_setAsync();
    record_->before(name_);
  }

  void leave(const pybind11::args&) { record_.reset(); }

 private:
  std::string name_;
  std::optional<at::RecordFunction> record_;
};

/* ---- the fast path: calls as DDP and FSDP make them, of contiguous tensors on a GPU
 *
 * Each read_... gives the arguments of the Communicator's method, whether the caller goes on before the call is
 * through, and its milliseconds; None for a call that is Python's to read. */

#ifndef BLINK_DEVICE /* another one in tests */
#define BLINK_DEVICE CUDA
#endif

/* The tensor that an object of Python is, if a call takes it as it lies in memory; else null.
 * empty: whether it may be without elements. */
const at::Tensor* plain(PyObject* object, bool empty = false) {
  if (!THPVariable_CheckExact(object)) return nullptr;
  const at::Tensor& tensor = THPVariable_Unpack(object);
  const bool fits = tensor.defined() && tensor.device().type() == c10::DeviceType::BLINK_DEVICE &&
                    tensor.layout() == c10::kStrided && tensor.is_contiguous() && !tensor.requires_grad() &&
                    !tensor.is_neg() && !tensor.is_conj() && !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
                    (tensor.const_data_ptr() || (empty && !tensor.numel()));
  return fits ? &tensor : nullptr;
}

/* The same of the one tensor of a list. */
const at::Tensor* only(pybind11::handle tensors) {
  const bool one = PyList_CheckExact(tensors.ptr()) && PyList_GET_SIZE(tensors.ptr()) == 1;
  return one ? plain(PyList_GET_ITEM(tensors.ptr(), 0)) : nullptr;
}

/* The options of a call; null if they are others, or none. */
template <class Options> const Options* options_of(pybind11::handle object) {
  pybind11::detail::make_caster<Options> caster;
  const bool loaded = !object.is_none() && caster.load(object, false);
  return loaded ? pybind11::detail::cast_op<Options*>(caster) : nullptr;
}

at::Tensor flat(const at::Tensor& tensor) {
  at::AutoDispatchBelowADInplaceOrView guard;
  return tensor.dim() == 1 ? tensor : tensor.view({-1});
}

at::Tensor bytes(const at::Tensor& tensor) { /* for what only moves */
  at::AutoDispatchBelowADInplaceOrView guard;
  return flat(tensor).view(at::kByte);
}

at::Tensor as_type(const at::Tensor& bytes, c10::ScalarType type) {
  at::AutoDispatchBelowADInplaceOrView guard;
  return bytes.view(type);
}

const char* at_byte(const at::Tensor& tensor, int64_t byte = 0) { return (const char*)tensor.const_data_ptr() + byte; }

bool overlap(const at::Tensor& one, const at::Tensor& other) {
  return at_byte(one) < at_byte(other, other.nbytes()) && at_byte(other) < at_byte(one, one.nbytes());
}

/* Our name of an operation, always the same object, by which C finds a call again (repeated_calls.h); null for one that
 * is Python's to read, as all are on bools, which torch takes as bits. */
pybind11::object operation(c10d::ReduceOp::RedOpType kind, const at::Tensor& tensor) {
  const auto named = [](const char* name) {
    return pybind11::reinterpret_steal<pybind11::object>(PyUnicode_InternFromString(name));
  };
  if (tensor.scalar_type() == c10::kBool) return {};
  switch (kind) {
    case c10d::ReduceOp::SUM: return named("sum");
    case c10d::ReduceOp::AVG: return named("avg");
    case c10d::ReduceOp::MIN: return named("min");
    case c10d::ReduceOp::MAX: return named("max");
    case c10d::ReduceOp::PRODUCT: return named("prod");
    default: return {};
  }
}

/* Older torch does not say of every call whether it is asynchronous, and waits for the Work if not. */
template <class Options> bool is_asynchronous(const Options& options) {
  if constexpr (requires { options.asyncOp; }) return options.asyncOp;
  else return true;
}

template <class Options, class... Arguments>
pybind11::object asked(const Options* options, Arguments&&... arguments) {
  return pybind11::make_tuple(pybind11::make_tuple(std::forward<Arguments>(arguments)...), is_asynchronous(*options),
                              options->timeout.count());
}

pybind11::object asked_to_reduce(const c10d::AllreduceOptions* given, const at::Tensor* tensor) {
  const auto op = given && tensor ? operation(given->reduceOp, *tensor) : pybind11::object();
  return op ? asked(given, pybind11::none(), flat(*tensor), op) : pybind11::none();
}

pybind11::object read_allreduce(pybind11::handle tensors, pybind11::handle options) {
  return asked_to_reduce(options_of<c10d::AllreduceOptions>(options), only(tensors));
}

/* The root's result is in place of its operand; the others have none. */
pybind11::object read_reduce(pybind11::handle tensors, int64_t rank, pybind11::handle options) {
  const auto* given = options_of<c10d::ReduceOptions>(options);
  const at::Tensor* tensor = only(tensors);
  const auto op = given && tensor ? operation(given->reduceOp, *tensor) : pybind11::object();
  if (!op) return pybind11::none();
  if (rank == given->rootRank) return asked(given, pybind11::none(), flat(*tensor), op, given->rootRank);
  return asked(given, flat(*tensor), pybind11::none(), op, given->rootRank);
}

pybind11::object read_broadcast(pybind11::handle tensors, pybind11::handle options) {
  const auto* given = options_of<c10d::BroadcastOptions>(options);
  const at::Tensor* tensor = only(tensors);
  return given && tensor ? asked(given, bytes(*tensor), given->rootRank) : pybind11::none();
}

pybind11::object read_allgather(pybind11::handle outputs, pybind11::handle inputs, int64_t rank,
                                pybind11::handle options) {
  const auto* given = options_of<c10d::AllgatherOptions>(options);
  const at::Tensor *output = plain(outputs.ptr()), *input = plain(inputs.ptr());
  if (!given || !output || !input) return pybind11::none();
  const bool in_place = at_byte(*input) == at_byte(*output, rank * input->nbytes());
  if (in_place) return asked(given, pybind11::none(), bytes(*output));
  return overlap(*input, *output) ? pybind11::none() : asked(given, bytes(*input), bytes(*output));
}

pybind11::object read_reduce_scatter(pybind11::handle outputs, pybind11::handle inputs, int64_t rank, int64_t n,
                                     pybind11::handle options) {
  const auto* given = options_of<c10d::ReduceScatterOptions>(options);
  const at::Tensor *output = plain(outputs.ptr()), *input = plain(inputs.ptr());
  if (!given || !output || !input) return pybind11::none();
  const int64_t block = output->nbytes();
  const bool in_place = at_byte(*output) == at_byte(*input, rank * block) && (int64_t)input->nbytes() == n * block;
  const auto op = operation(given->reduceOp, *output);
  if (!op || (overlap(*input, *output) && !in_place)) return pybind11::none();
  return asked(given, flat(*input), flat(*output), op);
}

bool are_split(pybind11::handle output_splits, pybind11::handle input_splits) {
  return PyObject_Length(output_splits.ptr()) > 0 || PyObject_Length(input_splits.ptr()) > 0;
}

/* The bytes of each rank's rows of a tensor; null for splits that are Python's to read or to refuse. None are equal ones. */
pybind11::object parts_of(const at::Tensor& tensor, pybind11::handle splits, int64_t n) {
  PyObject* const object = splits.ptr();
  if (!PyList_CheckExact(object) && !PyTuple_CheckExact(object)) return {};
  const int64_t rows = tensor.dim() ? tensor.size(0) : 1, row = rows ? (int64_t)tensor.nbytes() / rows : 0;
  const bool given = PySequence_Fast_GET_SIZE(object) > 0;
  if (given ? PySequence_Fast_GET_SIZE(object) != n : rows % n != 0) return {};
  pybind11::list parts(n);
  int64_t sum = 0;
  for (int64_t i = 0; i < n; i++) {
    PyObject* const number = given ? PySequence_Fast_GET_ITEM(object, i) : nullptr;
    if (number && !PyLong_CheckExact(number)) return {};
    const int64_t part = number ? PyLong_AsLongLong(number) : rows / n;
    if (PyErr_Occurred()) PyErr_Clear();
    if (part < 0 || part > rows - sum) return {};
    sum += part;
    parts[i] = pybind11::int_(part * row);
  }
  if (sum != rows) return {};
  return std::move(parts);
}

/* Splits of rows, as torch has them; with none, all ranks know that the parts are equal. */
pybind11::object read_alltoall(pybind11::handle outputs, pybind11::handle inputs, pybind11::handle output_splits,
                               pybind11::handle input_splits, int64_t n, pybind11::handle options) {
  const auto* given = options_of<c10d::AllToAllOptions>(options);
  const at::Tensor *output = plain(outputs.ptr(), true), *input = plain(inputs.ptr(), true);
  if (!given || !output || !input || overlap(*input, *output)) return pybind11::none();
  const auto mine = parts_of(*input, input_splits, n), theirs = parts_of(*output, output_splits, n);
  if (!mine || !theirs) return pybind11::none();
  if (are_split(output_splits, input_splits)) {
    pybind11::list send, recv;
    send.append(bytes(*input)), send.append(mine), recv.append(bytes(*output)), recv.append(theirs);
    return asked(given, send, recv);
  }
  return output->numel() && input->numel() ? asked(given, bytes(*input), bytes(*output)) : pybind11::none();
}

/* The tensors of a list of `n`, as plain() finds them; none if one of them is Python's to read. */
std::vector<at::Tensor> each_of(pybind11::handle list, int64_t n) {
  std::vector<at::Tensor> found;
  if (!PyList_CheckExact(list.ptr()) || PyList_GET_SIZE(list.ptr()) != n) return {};
  for (int64_t i = 0; i < n; i++) {
    const at::Tensor* const one = plain(PyList_GET_ITEM(list.ptr(), i));
    if (!one) return {};
    found.push_back(*one);
  }
  return found;
}

/* The one item of a list; null for another list. */
pybind11::handle only_list(pybind11::handle lists) {
  const bool one = PyList_CheckExact(lists.ptr()) && PyList_GET_SIZE(lists.ptr()) == 1;
  return one ? PyList_GET_ITEM(lists.ptr(), 0) : pybind11::none().ptr();
}

bool overlap(const at::Tensor& one, const std::vector<at::Tensor>& others) {
  return std::any_of(others.begin(), others.end(), [&](const at::Tensor& other) { return overlap(one, other); });
}

/* The bytes of tensors that lie one after another; undefined for others. */
at::Tensor as_one(const std::vector<at::Tensor>& tensors) {
  int64_t nbytes = 0;
  for (const auto& tensor : tensors) {
    if (!tensor.is_alias_of(tensors[0]) || at_byte(tensor) != at_byte(tensors[0], nbytes)) return {};
    nbytes += tensor.nbytes();
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return bytes(tensors[0]).as_strided({nbytes}, {1});
}

/* The bytes of some tensors one after another, in memory of their own if they do not lie so. */
at::Tensor joined(const std::vector<at::Tensor>& tensors) {
  at::Tensor found = as_one(tensors);
  if (found.defined()) return found;
  std::vector<at::Tensor> parts;
  for (const auto& tensor : tensors) parts.push_back(bytes(tensor));
  at::AutoDispatchBelowADInplaceOrView guard;
  return at::cat(parts);
}

/* Memory for the bytes of some tensors one after another: their own, if they lie so. */
at::Tensor memory_for(const std::vector<at::Tensor>& tensors) {
  at::Tensor found = as_one(tensors);
  if (found.defined()) return found;
  int64_t nbytes = 0;
  for (const auto& tensor : tensors) nbytes += tensor.nbytes();
  at::AutoDispatchBelowADInplaceOrView guard;
  return at::empty({nbytes}, tensors[0].options().dtype(at::kByte));
}

/* Whether they are all as long as one, and for a reduction of its type. */
bool are_like(const std::vector<at::Tensor>& tensors, const at::Tensor& one, bool typed) {
  return !tensors.empty() && std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.nbytes() == one.nbytes() && (!typed || tensor.scalar_type() == one.scalar_type());
  });
}

pybind11::list lengths_of(const std::vector<at::Tensor>& tensors) {
  pybind11::list found;
  for (const auto& tensor : tensors) found.append(tensor.nbytes());
  return found;
}

/* ---- calls beside the model, made again by C (repeated_calls.h) with no Python in between */

/* The tensors of a call that plain() has found. */
std::vector<at::Tensor> all_of(std::initializer_list<pybind11::handle> objects) {
  std::vector<at::Tensor> found;
  for (const auto& object : objects) found.push_back(THPVariable_Unpack(object.ptr()));
  return found;
}

/* A communicator's calls: those for which the user does not wait on the stream of all such calls, others on the current one.
 *
 * Each gives None for a call that is Python's to read; (arguments, apart, begun) for one that is Python's to make, as C
 * left it; else what torch gets for a call that was made. C keeps no operands: those of a call apart are its Work's, and
 * memory that is freed behind a call on the current stream is used again behind it there. */
class QuickCalls {
  enum { ALLREDUCE, BROADCAST, REDUCE, ALLGATHER, REDUCE_SCATTER, ALLTOALL, ALLTOALLV }; /* of `methods` */

 public:
  /* `noted` is the type of a call of a group; `here` gives the object of the current stream. */
  QuickCalls(pybind11::object repeated, pybind11::tuple methods, pybind11::object noted, pybind11::object stream,
             pybind11::object here, pybind11::object capturing, int64_t device, int64_t rank, int64_t n)
      : repeated_(std::move(repeated)), methods_(std::move(methods)), noted_(std::move(noted)),
        capturing_(std::move(capturing)), stream_object_(stream), here_(std::move(here)), stream_(stream.cast<c10::Stream>()),
        before_(stream_.device_type()), device_(device), rank_(rank), n_(n) {}

  pybind11::object allreduce(pybind11::handle tensors, pybind11::handle options, double timeout_ms) {
    const auto found = read_allreduce(tensors, options);
    return found.is_none() ? found : with_work(ALLREDUCE, found, timeout_ms, all_of({first(tensors)}), all_of({first(tensors)}));
  }

  pybind11::object broadcast(pybind11::handle tensors, pybind11::handle options, double timeout_ms) {
    const auto found = read_broadcast(tensors, options);
    return found.is_none() ? found : with_work(BROADCAST, found, timeout_ms, all_of({first(tensors)}), all_of({first(tensors)}));
  }

  pybind11::object allgather(pybind11::handle output, pybind11::handle input, pybind11::handle options, double timeout_ms) {
    const auto found = read_allgather(output, input, rank_, options);
    return found.is_none() ? found : with_work(ALLGATHER, found, timeout_ms, all_of({output}), all_of({output, input}));
  }

  pybind11::object reduce_scatter(pybind11::handle output, pybind11::handle input, pybind11::handle options,
                                  double timeout_ms) {
    const auto found = read_reduce_scatter(output, input, rank_, n_, options);
    return found.is_none() ? found : with_work(REDUCE_SCATTER, found, timeout_ms, all_of({output}), all_of({output, input}));
  }

  pybind11::object reduce(pybind11::handle tensors, pybind11::handle options, double timeout_ms) {
    const auto found = read_reduce(tensors, rank_, options);
    return found.is_none() ? found : with_work(REDUCE, found, timeout_ms, all_of({first(tensors)}), all_of({first(tensors)}));
  }

  pybind11::object alltoall(pybind11::handle output, pybind11::handle input, pybind11::handle output_splits,
                            pybind11::handle input_splits, pybind11::handle options, double timeout_ms) {
    const auto found = read_alltoall(output, input, output_splits, input_splits, n_, options);
    if (found.is_none()) return found;
    const size_t method = are_split(output_splits, input_splits) ? ALLTOALLV : ALLTOALL;
    return with_work(method, found, timeout_ms, all_of({output}), all_of({output, input}));
  }

  /* Into a list of tensors of equal lengths, which are copied there if they do not lie one after another. */
  pybind11::object allgather_list(pybind11::handle lists, pybind11::handle inputs, pybind11::handle options,
                                  double timeout_ms) {
    const auto* given = options_of<c10d::AllgatherOptions>(options);
    const at::Tensor* const input = only(inputs);
    auto outputs = each_of(only_list(lists), n_);
    if (!given || !input || !are_like(outputs, *input, false) || overlap(*input, outputs)) return pybind11::none();
    const at::Tensor whole = memory_for(outputs);
    std::vector<at::Tensor> operands{*input, whole};
    operands.insert(operands.end(), outputs.begin(), outputs.end());
    return with_work(ALLGATHER, asked(given, bytes(*input), whole), timeout_ms, std::move(outputs), std::move(operands), whole);
  }

  pybind11::object reduce_scatter_list(pybind11::handle outputs, pybind11::handle lists, pybind11::handle options,
                                       double timeout_ms) {
    const auto* given = options_of<c10d::ReduceScatterOptions>(options);
    const at::Tensor* const output = only(outputs);
    const auto inputs = each_of(only_list(lists), n_);
    if (!given || !output || !are_like(inputs, *output, true) || overlap(*output, inputs)) return pybind11::none();
    const auto op = operation(given->reduceOp, *output);
    const at::Tensor whole = op ? as_type(joined(inputs), output->scalar_type()) : at::Tensor();
    if (!whole.defined()) return pybind11::none();
    std::vector<at::Tensor> operands{*output, whole};
    operands.insert(operands.end(), inputs.begin(), inputs.end());
    return with_work(REDUCE_SCATTER, asked(given, whole, flat(*output), op), timeout_ms, {*output}, std::move(operands));
  }

  pybind11::object alltoall_list(pybind11::handle given_outputs, pybind11::handle given_inputs, pybind11::handle options,
                                 double timeout_ms) {
    const auto* given = options_of<c10d::AllToAllOptions>(options);
    auto outputs = each_of(given_outputs, n_);
    const auto inputs = each_of(given_inputs, n_);
    if (!given || outputs.empty() || inputs.empty()) return pybind11::none();
    for (const auto& output : outputs)
      if (overlap(output, inputs)) return pybind11::none();
    const at::Tensor sent = joined(inputs), whole = memory_for(outputs);
    pybind11::list send, recv;
    send.append(sent), send.append(lengths_of(inputs)), recv.append(whole), recv.append(lengths_of(outputs));
    std::vector<at::Tensor> operands{sent, whole};
    for (const auto* some : {&inputs, &std::as_const(outputs)}) operands.insert(operands.end(), some->begin(), some->end());
    return with_work(ALLTOALLV, asked(given, send, recv), timeout_ms, std::move(outputs), std::move(operands), whole);
  }

  /* Some calls as a group. None, too, for a group that is Python's to make. */
  pybind11::object allreduces(pybind11::handle tensors, pybind11::handle options, double timeout_ms) {
    const auto* given = options_of<c10d::AllreduceCoalescedOptions>(options);
    return grouped(ALLREDUCE, tensors, tensors, timeout_ms, [&](PyObject* tensor, PyObject*) {
      return asked_to_reduce(given, plain(tensor));
    });
  }

  pybind11::object allgathers(pybind11::handle outputs, pybind11::handle inputs, pybind11::handle options,
                              double timeout_ms) {
    return grouped(ALLGATHER, outputs, inputs, timeout_ms, [&](PyObject* output, PyObject* input) {
      return read_allgather(output, input, rank_, options);
    });
  }

  pybind11::object reduce_scatters(pybind11::handle outputs, pybind11::handle inputs, pybind11::handle options,
                                   double timeout_ms) {
    return grouped(REDUCE_SCATTER, outputs, inputs, timeout_ms, [&](PyObject* output, PyObject* input) {
      return read_reduce_scatter(output, input, rank_, n_, options);
    });
  }

  /* A future of a tensor that is averaged in place, for DDP's hook. */
  pybind11::object average(const pybind11::object& object) {
    const at::Tensor* tensor = plain(object.ptr());
    const auto op = tensor ? operation(c10d::ReduceOp::AVG, *tensor) : pybind11::object();
    if (!op || tensor->get_device() != device_) return pybind11::none();
    const auto arguments = pybind11::make_tuple(pybind11::none(), flat(*tensor), op);
    const auto begun = made(ALLREDUCE, arguments, true);
    if (begun.ptr() != Py_True) return pybind11::make_tuple(arguments, true, begun);
    if (tensor->is_cuda()) tensor->record_stream(stream_); /* where backward fails, nobody waits for its buckets */
    auto value = torch::jit::toIValue(object, c10::PyObjectType::get());
    return pybind11::cast(std::make_shared<torch::jit::PythonFutureWrapper>(
        completed(c10::PyObjectType::get(), stream_, std::move(value), {*tensor})));
  }

 private:
  static pybind11::handle first(pybind11::handle tensors) { return PyList_GET_ITEM(tensors.ptr(), 0); }

  /* What C says of a call that is put on the current stream, or apart behind that, if none is captured. */
  pybind11::object made(size_t method, const pybind11::object& arguments, bool apart) {
    const auto stream = stream_for(apart);
    return stream ? again(method, arguments, stream) : pybind11::bool_(false);
  }

  pybind11::object again(size_t method, const pybind11::object& arguments, const pybind11::object& stream) {
    return repeated_.attr("again")(methods_[method], arguments, stream, true);
  }

  /* The object of the stream of a call, which waits for the current one if it is apart; null during a capture. */
  pybind11::object stream_for(bool apart) {
    if (capturing_().ptr() != Py_False) return {};
    const c10::Stream current = current_stream(stream_.device());
    if (!apart) return object_of(current);
    before_.record(current); /* again and again: who waits for an event waits for it as it is then */
    before_.block(stream_);
    return stream_object_;
  }

  /* Python's object of the current stream, which takes long to make. */
  pybind11::object object_of(const c10::Stream& current) {
    if (objects_.size() > MOST_STREAMS) objects_.clear();
    auto& object = objects_[current.id()];
    if (!object) object = here_();
    return object;
  }

  /* Whether C may make a call with such a deadline, if it has one of its own. */
  static bool in_time(const pybind11::tuple& asked, double timeout_ms) {
    const auto own_ms = asked[2].cast<double>();
    return own_ms <= 0 || own_ms == timeout_ms;
  }

  /* parts: what the call writes in place of a list of outputs, if it is defined; it is copied to them if it is not theirs. */
  pybind11::object with_work(size_t method, const pybind11::object& found, double timeout_ms,
                             std::vector<at::Tensor> outputs, std::vector<at::Tensor> operands,
                             const at::Tensor& parts = {}) {
    const auto asked = pybind11::reinterpret_borrow<pybind11::tuple>(found);
    if (!in_time(asked, timeout_ms)) return pybind11::none();
    const bool apart = asked[1].cast<bool>();
    pybind11::object begun = pybind11::bool_(false);
    if (outputs[0].get_device() == device_) begun = made(method, asked[0], apart);
    if (begun.ptr() != Py_True) {
      if (begun.ptr() == Py_False && parts.defined()) return pybind11::none(); /* with memory of its own */
      return pybind11::make_tuple(asked[0], asked[1], begun);
    }
    const c10::Stream stream = apart ? stream_ : current_stream(stream_.device());
    if (parts.defined() && at_byte(parts) != at_byte(outputs[0])) spread(parts, outputs, stream);
    return work_on(std::move(outputs), std::move(operands), stream, apart);
  }

  static pybind11::object work_on(std::vector<at::Tensor> outputs, std::vector<at::Tensor> operands, c10::Stream stream,
                                  bool apart) {
    return pybind11::cast(c10::intrusive_ptr<c10d::Work>(
        c10::make_intrusive<StreamWork>(std::move(outputs), std::move(operands), stream, apart)));
  }

  /* Copy bytes to the tensors that they are the elements of, on a stream; also to those of inference mode. */
  static void spread(const at::Tensor& parts, const std::vector<at::Tensor>& outputs, const c10::Stream& stream) {
    c10::InferenceMode any;
    c10::StreamGuard on(stream);
    int64_t at = 0;
    for (const auto& output : outputs) {
      flat(output).view(at::kByte).copy_(parts.narrow(0, at, output.nbytes()));
      at += output.nbytes();
    }
  }

  /* Calls of pairs of tensors as `grouped()` notes them; `read` gives what read_... gives of a pair. */
  template <class Read>
  pybind11::object grouped(size_t method, pybind11::handle outputs, pybind11::handle inputs, double timeout_ms, Read read) {
    const bool lists = PyList_CheckExact(outputs.ptr()) && PyList_CheckExact(inputs.ptr());
    const Py_ssize_t many = lists ? PyList_GET_SIZE(outputs.ptr()) : 0;
    if (!many || PyList_GET_SIZE(inputs.ptr()) != many) return pybind11::none();
    std::vector<pybind11::tuple> asked;
    std::vector<at::Tensor> written, operands;
    for (Py_ssize_t i = 0; i < many; i++) {
      PyObject *const output = PyList_GET_ITEM(outputs.ptr(), i), *const input = PyList_GET_ITEM(inputs.ptr(), i);
      const auto one = read(output, input);
      if (one.is_none() || THPVariable_Unpack(output).get_device() != device_) return pybind11::none();
      asked.push_back(pybind11::reinterpret_borrow<pybind11::tuple>(one));
      written.push_back(THPVariable_Unpack(output)), operands.push_back(THPVariable_Unpack(output));
      if (input != output) operands.push_back(THPVariable_Unpack(input));
    }
    const bool apart = asked[0][1].template cast<bool>();
    const auto stream = in_time(asked[0], timeout_ms) ? stream_for(apart) : pybind11::object();
    if (!stream) return pybind11::none();
    const auto make = pybind11::handle((PyObject*)&PyTuple_Type).attr("__new__");
    pybind11::tuple calls(many);
    for (Py_ssize_t i = 0; i < many; i++)
      calls[i] = make(noted_, pybind11::make_tuple(methods_[method], asked[i][0], pybind11::none(), stream));
    const auto begun = again(method, calls, stream);
    if (begun.ptr() == Py_False) return pybind11::none();
    if (begun.ptr() != Py_True) return pybind11::make_tuple(calls, apart, begun);
    return work_on(std::move(written), std::move(operands), apart ? stream_ : current_stream(stream_.device()), apart);
  }

  pybind11::object repeated_;
  pybind11::tuple methods_;
  pybind11::object noted_, capturing_, stream_object_, here_;
  std::map<c10::StreamId, pybind11::object> objects_; /* of current streams */
  c10::Stream stream_;
  c10::Event before_; /* on the current stream, for a call apart */
  int64_t device_, rank_, n_;
};

/* ---- messages: this rank's end of those to a rank, or from it (transport/cuda/messages.py) */

class MessageEnd {
 public:
  /* What Fifo.for_c gives, the methods of its order's lock, its stream, and the word of a report that is not 0 if a kernel
   * gave up. */
  MessageEnd(const std::map<std::string, int64_t>& numbers, std::vector<uint64_t> words, pybind11::object acquire,
             pybind11::object release, const pybind11::object& stream, uint64_t report)
      : words_(std::move(words)), acquire_(std::move(acquire)), release_(std::move(release)),
        stream_(stream.cast<c10::Stream>()), report_((const int64_t*)report),
        launch_((Launch)numbers.at("launch")), wait_((Wait)numbers.at("wait")), record_((Record)numbers.at("record")),
        capturing_((Capturing)numbers.at("capturing")), function_((void*)numbers.at("function")),
        on_((void*)numbers.at("stream")), chain_((void*)numbers.at("chain")), block_(numbers.at("block")),
        device_(numbers.at("device")), lane_(numbers.at("lane")), lanes_(numbers.at("lanes")),
        timeout_at_(numbers.at("timeout_at")), buffer_at_(numbers.at("buffer_at")) {}

  /* Put a message of a tensor on the stream, behind what is on the current one: torch's Work. CUDA's error of a launch that
   * failed. None for a message that is Python's to put there: nothing has changed then. */
  pybind11::object put(const pybind11::handle& object, int64_t tag, uint64_t timeout_ns) {
    const at::Tensor* tensor = plain(object.ptr());
    int captured = 0;
    if (!tensor || tensor->get_device() != device_ || report_[1]) return pybind11::none();
    recorded(current_stream(stream_.device())).block(stream_);
    if (capturing_(on_, &captured) || captured) return pybind11::none();
    if (acquire_(false).ptr() != Py_True) return pybind11::none();
    const uint64_t nbytes = tensor->nbytes(), lanes = std::min(std::max<uint64_t>(1, (nbytes + lane_ - 1) / lane_), lanes_);
    int error;
    {
      std::vector<uint64_t> words = words_;
      words[timeout_at_] = timeout_ns, words[buffer_at_] = (uint64_t)tensor->const_data_ptr();
      words[words.size() - 2] = nbytes, words[words.size() - 1] = (uint64_t)tag;
      void* parameters[] = {words.data()};
      pybind11::gil_scoped_release others; /* the queue of launches may be full */
      error = wait_(on_, chain_, 0);
      if (!error) error = launch_(function_, (unsigned)lanes, 1, 1, (unsigned)block_, 1, 1, 0, on_, parameters, nullptr);
      if (!error) error = record_(chain_, on_);
    }
    release_();
    if (error) return pybind11::int_(error);
    std::vector<at::Tensor> tensors{*tensor};
    return pybind11::cast(
        c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<StreamWork>(tensors, tensors, stream_, true)));
  }

 private:
  using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  using Wait = int (*)(void*, void*, unsigned);
  using Record = int (*)(void*, void*);
  using Capturing = int (*)(void*, int*);

  std::vector<uint64_t> words_;
  pybind11::object acquire_, release_;
  c10::Stream stream_;
  const int64_t* report_;
  Launch launch_;
  Wait wait_;
  Record record_;
  Capturing capturing_;
  void *function_, *on_, *chain_;
  uint64_t block_;
  int64_t device_;
  uint64_t lane_, lanes_, timeout_at_, buffer_at_;
};

/* ---- how C reads a tensor (tensor_t of device_arrays.h), by less work than DLPack's own function does */

struct Exchange { /* DLPackExchangeAPI, of DLPack 1.3 */
  uint32_t major, minor;
  void *before, *allocate, *own, *give;
  int (*show)(void*, DLTensor*);
  int (*stream)(int32_t, int32_t, void**);
};

Exchange quick; /* torch's, with our `show` */

/* Show a tensor on a GPU as it lies in memory; 1, and no error, for one that shows other values than lie there. */
int show(void* object, DLTensor* out) noexcept {
  try {
    const at::Tensor& tensor = THPVariable_Unpack((PyObject*)object);
    if (tensor.layout() != c10::kStrided || !tensor.is_cuda() || tensor.is_neg() || tensor.is_conj()) return 1;
    *out = {};
    out->data = const_cast<void*>(tensor.const_data_ptr());
    out->device = {DLDeviceType(CUDA), tensor.device().index()};
    out->ndim = (int32_t)tensor.dim();
    out->dtype = at::getDLDataType(tensor);
    out->shape = const_cast<int64_t*>(tensor.sizes().data());
    out->strides = const_cast<int64_t*>(tensor.strides().data());
    return 0;
  } catch (const std::exception&) { /* it has no memory, or a type that DLPack has not: for Python to read */
    return 1;
  }
}

/* The capsule of `quick`; it has a context, which says that tensors that show negatives are refused. */
pybind11::capsule exchange(const pybind11::object& torchs) {
  const auto* found = (const Exchange*)PyCapsule_GetPointer(torchs.ptr(), CAPSULE);
  if (!found) throw pybind11::error_already_set();
  quick = *found;
  quick.show = show;
  auto capsule = pybind11::reinterpret_steal<pybind11::capsule>(PyCapsule_New(&quick, CAPSULE, nullptr));
  if (!capsule || PyCapsule_SetContext(capsule.ptr(), &quick)) throw pybind11::error_already_set();
  return capsule;
}

}  // namespace

PYBIND11_MODULE(torch_extension, m) {
  pybind11::module_::import("torch");
  m.def("raises", [](const pybind11::object& error) { timeout_error = error.inc_ref().ptr(); });
  m.def("fits", [](const c10d::AllreduceOptions&) { return c10::make_intrusive<c10d::Work>(); });
  m.def("exchange", &exchange);
  m.def("read_allreduce", &read_allreduce);
  m.def("read_broadcast", &read_broadcast);
  m.def("read_allgather", &read_allgather);
  m.def("read_reduce_scatter", &read_reduce_scatter);
  m.def("read_reduce", &read_reduce);
  m.def("read_alltoall", &read_alltoall);
  pybind11::class_<Span>(m, "Span")
      .def(pybind11::init<std::string>())
      .def("__enter__", &Span::enter)
      .def("__exit__", &Span::leave);
  pybind11::class_<QuickCalls>(m, "QuickCalls")
      .def(pybind11::init<pybind11::object, pybind11::tuple, pybind11::object, pybind11::object, pybind11::object,
                          pybind11::object, int64_t, int64_t, int64_t>())
      .def("allreduce", &QuickCalls::allreduce)
      .def("broadcast", &QuickCalls::broadcast)
      .def("allgather", &QuickCalls::allgather)
      .def("reduce_scatter", &QuickCalls::reduce_scatter)
      .def("reduce", &QuickCalls::reduce)
      .def("alltoall", &QuickCalls::alltoall)
      .def("allgather_list", &QuickCalls::allgather_list)
      .def("reduce_scatter_list", &QuickCalls::reduce_scatter_list)
      .def("alltoall_list", &QuickCalls::alltoall_list)
      .def("allreduces", &QuickCalls::allreduces)
      .def("allgathers", &QuickCalls::allgathers)
      .def("reduce_scatters", &QuickCalls::reduce_scatters)
      .def("average", &QuickCalls::average);
  pybind11::class_<MessageEnd>(m, "MessageEnd")
      .def(pybind11::init<const std::map<std::string, int64_t>&, std::vector<uint64_t>, pybind11::object, pybind11::object,
                          const pybind11::object&, uint64_t>())
      .def("put", &MessageEnd::put);
  m.def("follow", [](const c10::Stream& stream) { recorded(current_stream(stream.device())).block(stream); });
  m.def("work", [](std::vector<at::Tensor> outputs, std::vector<at::Tensor> operands, const c10::Stream& stream,
                   bool apart) {
    return c10::intrusive_ptr<c10d::Work>(
        c10::make_intrusive<StreamWork>(std::move(outputs), std::move(operands), stream, apart));
  });
  m.def("future", [](const pybind11::object& value, const at::Tensor& memory, const c10::Stream& stream) {
    auto held = torch::jit::toIValue(value, c10::PyObjectType::get());
    return std::make_shared<torch::jit::PythonFutureWrapper>(
        completed(c10::PyObjectType::get(), stream, std::move(held), {memory}));
  });
}
