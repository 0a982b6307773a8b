/* What torch asks of a call on a stream, in C++: the Work that it gets, futures, and what a tensor is.
 *
 * In Python they take the host long: torch finds the memory of a future's value by pickling it, and the code that does so
 * is cold each time a bucket of gradients is ready. */
#include <ATen/DLConvertor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <thread>

namespace {

using c10::ivalue::Future;
using std::chrono::milliseconds;

constexpr auto POLL = std::chrono::microseconds(200);
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

/* A call on a stream. `operands` must live until it is through: the first wait gives them back, or they are left to the
 * stream. */
class StreamWork : public c10d::Work {
 public:
  StreamWork(std::vector<at::Tensor> outputs, std::vector<at::Tensor> operands, c10::Stream stream)
      : outputs_(std::move(outputs)), operands_(std::move(operands)), stream_(stream), event_(recorded(stream)) {}

  ~StreamWork() override {
    for (const auto& tensor : operands_) try {
        if (tensor.is_cuda()) tensor.record_stream(stream_);
      } catch (const c10::Error& error) { /* as the process ends, CUDA may have gone */
        TORCH_WARN("memory of a call for which nobody waited: ", error.what_without_backtrace());
      }
  }

  bool isCompleted() override { return event_.query(); }

  bool isSuccess() const override { return event_.query(); }

  bool wait(milliseconds timeout) override {
    event_.block(current_stream(stream_.device()));
    std::vector<at::Tensor> given; /* what the current stream does next, freeing them too, comes behind the call */
    {
      std::lock_guard<std::mutex> one(giving_);
      given.swap(operands_);
    }
    given.clear(); /* which may take Python's lock */
    const auto until = std::chrono::steady_clock::now() + timeout;
    while (timeout.count() > 0 && !event_.query()) {
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
  c10::Event event_;
  std::mutex giving_;
};

/* ---- what DDP asks for: an AllReduce of one flat tensor, for each bucket of gradients */

/* Whether a call takes the tensor as it is. */
bool is_flat(const at::Tensor& tensor) {
  return tensor.is_cuda() && tensor.layout() == c10::kStrided && tensor.dim() == 1 && tensor.is_contiguous() &&
         tensor.scalar_type() != c10::kBool && !tensor.requires_grad() && !tensor.is_neg() && !tensor.is_conj() &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch() && tensor.const_data_ptr();
}

/* Whether the caller goes on before the call is through; older torch does not say, and waits for the Work if not. */
template <class Options> bool is_asynchronous(const Options& options) {
  if constexpr (requires { options.asyncOp; }) return options.asyncOp;
  else return true;
}

/* (tensor, operation, milliseconds) of a sum or an average that is asynchronous; None for what is Python's to read. */
pybind11::object read_allreduce(const std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) {
  const auto kind = c10d::ReduceOp::RedOpType(options.reduceOp);
  const bool known = kind == c10d::ReduceOp::SUM || kind == c10d::ReduceOp::AVG;
  if (!known || !is_asynchronous(options) || tensors.size() != 1 || !is_flat(tensors[0])) return pybind11::none();
  return pybind11::make_tuple(tensors[0], kind == c10d::ReduceOp::SUM ? "sum" : "avg", options.timeout.count());
}

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
  m.def("follow", [](const c10::Stream& stream) { recorded(current_stream(stream.device())).block(stream); });
  m.def("work", [](std::vector<at::Tensor> outputs, std::vector<at::Tensor> operands, const c10::Stream& stream) {
    return c10::intrusive_ptr<c10d::Work>(
        c10::make_intrusive<StreamWork>(std::move(outputs), std::move(operands), stream));
  });
  m.def("future", [](const pybind11::object& value, const at::Tensor& memory, const c10::Stream& stream) {
    auto held = torch::jit::toIValue(value, c10::PyObjectType::get());
    return std::make_shared<torch::jit::PythonFutureWrapper>(
        completed(c10::PyObjectType::get(), stream, std::move(held), {memory}));
  });
}
