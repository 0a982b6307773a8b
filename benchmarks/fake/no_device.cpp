/* A device of torch without memory or kernels, whose streams are where the test says: for Work and futures of streams. */
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

namespace {

using c10::DeviceType;
using c10::Stream;

bool through = true;   /* what events say when they are asked */
int recorded, blocked; /* events recorded; streams that were told to wait for one */
int created;           /* events */
int64_t current = 0;   /* the current stream */

struct NoDevice final : c10::impl::NoOpDeviceGuardImpl<DeviceType::PrivateUse1> {
  void record(void** event, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    created += !*event, *event = &recorded, recorded++;
  }
  void block(void*, const Stream&) const override { blocked++; }
  bool queryEvent(void*) const override { return through; }
  bool queryStream(const Stream&) const override { return through; }
  Stream getStream(c10::Device device) const noexcept override { return Stream(Stream::UNSAFE, device, current); }
  Stream exchangeStream(Stream stream) const noexcept override {
    const Stream before = getStream(stream.device());
    current = stream.id();
    return before;
  }
  Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return Stream(Stream::UNSAFE, device, 7); }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, NoDevice);

}  // namespace

PYBIND11_MODULE(no_device, m) {
  m.def("stream", [](int64_t id) { return Stream(Stream::UNSAFE, c10::Device(DeviceType::PrivateUse1, 0), id); });
  m.def("say", [](bool now) { through = now; });
  m.def("go_on", [](int64_t id) { current = id; });
  m.def("created", [] { return created; });
  m.def("counts", [] { return std::make_pair(recorded, blocked); });
}
