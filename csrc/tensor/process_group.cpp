#include "tensor/process_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "accelerator/plain_torch.h"
#include "accelerator/torch_stream.h"
#include "io/file.h"
#include "io/private_pages.h"
#include "tensor/shared_memory.h"

namespace dynswap {

namespace {

/// How often a rank that waits for the others looks whether one of them has failed.
constexpr std::chrono::milliseconds kLook{500};
constexpr const char* kFailed = "failed";

std::string key_of_pass(std::uint64_t pass) { return "pass " + std::to_string(pass); }
std::string key_of(std::size_t rank) { return "rank " + std::to_string(rank); }

/// What a collective has failed of. Gloo speaks of sockets and files of its own source.
std::string reason_of(const std::exception& error) {
  const std::string text = error.what();
  const auto says = [&text](const char* words) { return text.find(words) != std::string::npos; };
  if (says("onnection closed") || says("onnection reset") || says("roken pipe"))
    return "a connection is closed, as it is when a process ends";
  if (says("imed out")) return "the timeout of the process group is over";
  return text;
}

/// Makes `stream` the calling thread's current one.
class OnStream {
 public:
  OnStream(const c10::Device& device, const c10::Stream& stream) : device_(device), guard_(device.type()) {
    before_device_ = guard_.exchangeDevice(device);
    before_ = guard_.exchangeStream(stream);
  }
  ~OnStream() {
    guard_.exchangeStream(before_);
    guard_.uncheckedSetDevice(before_device_);
  }
  OnStream(const OnStream&) = delete;
  OnStream& operator=(const OnStream&) = delete;

 private:
  const c10::Device device_;
  const c10::impl::VirtualGuardImpl guard_;
  c10::Device before_device_{c10::kCPU};
  c10::Stream before_{c10::Stream::DEFAULT, c10::Device(c10::kCPU)};
};

class GroupRanks final : public Ranks {
 public:
  GroupRanks(RanksOfGroup group, const c10::Device& device)
      : group_(std::move(group)), device_(device), store_(group_.store->clone()) {
    if (device.is_cpu()) return;
    stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, false);
  }

  std::size_t rank() const noexcept override { return static_cast<std::size_t>(group_.for_host->getRank()); }
  std::size_t size() const noexcept override { return static_cast<std::size_t>(group_.for_host->getSize()); }
  std::size_t number_of(std::size_t rank) const noexcept override { return group_.numbers[rank]; }
  Stream stream() const noexcept override { return stream_ ? handle_of(*stream_) : 0; }

  void all_gather(std::byte* memory, std::size_t part) override {
    const PlainTorch guard;
    const auto bytes = static_cast<std::int64_t>(part), ranks = static_cast<std::int64_t>(size());
    at::Tensor all = at::for_blob(memory, {bytes * ranks})
                         .options(at::TensorOptions().dtype(at::kByte).device(device_))
                         .target_device(device_)
                         .make_tensor();
    at::Tensor own = all.narrow(0, bytes * static_cast<std::int64_t>(rank()), bytes);
    if (stream_) {
      const OnStream on(device_, *stream_);
      group_.for_device->_allgather_base(all, own)->wait();  // the stream waits, and not this thread
      return;
    }
    // In memory of its own: a collective that nobody waits for any more may still read and write.
    at::Tensor given = own.clone(), received = at::empty_like(all);
    wait(*group_.for_device->_allgather_base(received, given));
    all.copy_(received);
  }

  std::unique_ptr<Told> tell(const Words& words) override {
    const PlainTorch guard;
    const auto numbers = static_cast<std::int64_t>(words.size());
    auto told = std::make_unique<Telling>(*this);
    told->own = at::empty({numbers}, at::kLong);
    std::copy(words.begin(), words.end(), told->own.mutable_data_ptr<std::int64_t>());
    told->all = at::empty({numbers * static_cast<std::int64_t>(size())}, at::kLong);
    try {
      told->work = group_.for_host->_allgather_base(told->all, told->own);
    } catch (const std::exception& error) {
      throw Error(reason_of(error));
    }
    return told;
  }

  void note_pass(std::uint64_t pass) override {
    const std::string key = key_of_pass(pass);
    if (store_->add(key, 1) == static_cast<std::int64_t>(size())) store_->deleteKey(key);
    note("is in call " + std::to_string(pass) + " of the model", false);
  }
  bool begun(std::uint64_t pass) override { return store_->check({key_of_pass(pass)}); }

  void note(const std::string& state, bool failed) noexcept override {
    try {
      store_->set(key_of(rank()), std::vector<std::uint8_t>(state.begin(), state.end()));
      if (failed) store_->set(kFailed, std::vector<std::uint8_t>{1});
    } catch (const std::exception&) {  // the process that has the store may have ended: states() says so
    }
  }

  std::string states() noexcept override {
    std::string text;
    for (std::size_t other = 0; other < size(); ++other) {
      if (other == rank()) continue;
      text += (text.empty() ? "" : ", ") + ("rank " + std::to_string(number_of(other)) + " ");
      try {
        const std::string key = key_of(other);
        if (!store_->check({key})) {
          text += "has not called the model";
          continue;
        }
        const std::vector<std::uint8_t> state = store_->get(key);
        text.append(state.begin(), state.end());
      } catch (const std::exception&) {
        text += "cannot be asked, as the process with the store of the ranks has ended";
      }
    }
    return text;
  }

 private:
  struct Telling final : Told {
    explicit Telling(GroupRanks& of) : ranks(of) {}
    std::vector<Words> wait() override {
      ranks.wait(*work);
      std::vector<Words> words(ranks.size());
      const std::int64_t* from = all.const_data_ptr<std::int64_t>();
      for (Words& each : words) {
        std::copy(from, from + each.size(), each.begin());
        from += each.size();
      }
      return words;
    }
    GroupRanks& ranks;
    at::Tensor own, all;
    c10::intrusive_ptr<c10d::Work> work;
  };

  /// Waits for a collective on the host. Throws if it fails, or another rank has failed meanwhile.
  void wait(c10d::Work& work) {
    for (;;) {
      try {
        work.wait(kLook);
        return;
      } catch (const std::exception& error) {
        if (work.isCompleted()) throw Error(reason_of(error));
      }
      if (store_->check({kFailed})) throw Error("another rank has failed");
    }
  }

  const RanksOfGroup group_;
  const c10::Device device_;
  const c10::intrusive_ptr<c10d::Store> store_;  ///< a connection of its own
  std::optional<c10::Stream> stream_;
};

}  // namespace

std::unique_ptr<Ranks> ranks_of(const RanksOfGroup& group, const c10::Device& device) {
  return std::make_unique<GroupRanks>(group, device);
}

std::uint64_t place_on_host(const Source& source) {
  std::uint64_t place = 0;
  const auto add = [&place](std::uint64_t number) { place = c10::hash_combine(place, number); };
  for (const SourcePtr& part : source.parts) {
    const std::uint64_t of_part = place_on_host(*part);
    if (of_part == 0) return 0;
    add(of_part);
  }
  if (source.file) {
    if (source.address != nullptr && !private_ranges(source.address, source.extent()).empty()) return 0;
    add(source.file->device());
    add(source.file->inode());
    add(source.offset);
  } else if (source.parts.empty()) {
    const auto shared = shared_place(source.address, source.extent());
    if (!shared) return 0;
    add(shared->inode);
    add(shared->offset);
  }
  add(source.count);
  add(source.coding ? source.coded_first + 1 : 0);
  add(static_cast<std::uint64_t>(source.stored));
  return place == 0 ? 1 : place;
}

}  // namespace dynswap
