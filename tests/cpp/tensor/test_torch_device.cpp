// Streams and events through torch's own, over a device of which the test says what it answers.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include "accelerator/torch_device.h"
#include "check.h"

namespace dynswap::test {

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

int answer = 0;  ///< what a query fails with; 0: the event is not over

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kType> {
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = this_event();
  }
  bool queryEvent(void*) const override {
    if (answer != 0) throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, answer, "an error");
    return false;
  }
  static void* this_event() {
    static int event = 0;
    return &event;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

TEST(an_error_that_ends_all_work_ends_what_an_event_of_torchs_stands_for) {
  const TorchDevice device(c10::Device(kType, 0));
  const DeviceEventPtr event = device.make_event(/*timed=*/false);
  event->record(0);
  EXPECT(!event->passed());
  for (const int error : {226, 700, 721, 810, 911}) {
    answer = error;
    EXPECT(event->passed());
  }
  for (const int error : {1, 400, 906}) {
    answer = error;
    EXPECT(!event->passed());
  }
  answer = 0;
}

}  // namespace dynswap::test
