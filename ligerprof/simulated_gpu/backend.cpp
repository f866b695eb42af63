// A CUDA device for torch that computes nothing: its tensors have sizes, strides and addresses, and no memory.
//
// torch's dispatcher, autograd and autocast treat the tensors as those of a GPU. Storages ask a callback for an address
// and return it when they end, in the order in which a GPU's storages do. Operators that compute are registered from
// Python; this file has what torch reaches from C++ alone: device guard, hooks, allocators, generators, streams,
// factories and views.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/fill_native.h>
#include <ATen/ops/normal_native.h>
#include <ATen/ops/uniform_native.h>
#include <ATen/ops/zero_native.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

// of Python's stable interface, declared here so that its headers are not needed
extern "C" {
int PyGILState_Ensure();
void PyGILState_Release(int);
void PyErr_Fetch(void**, void**, void**);
void PyErr_Restore(void*, void*, void*);
}

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

// address of a block, 0 if memory ran out (`message` says how) or the callback failed
using Allocate = uint64_t (*)(uint64_t size_bytes, int64_t stream);
using Release = void (*)(uint64_t address);
// a host thread waits for a stream, or for all if it is negative
using Synchronize = void (*)(int64_t stream);

struct Callbacks {
  Allocate allocate;
  Release release;
  Synchronize synchronize;
};

std::atomic<Callbacks*> callbacks{nullptr};
thread_local std::string message;
// A process has one of its node's GPUs: the first one that it names.
std::atomic<DeviceIndex> own_index{0}, node_count{1};
std::atomic<bool> is_named{false};
Device gpu() { return Device(DeviceType::CUDA, own_index); }

// What is wrong with a GPU that a program names; empty if nothing is.
std::string claim(int64_t index) {
  if (index >= 0 && index < node_count && !is_named.exchange(true)) own_index = static_cast<DeviceIndex>(index);
  if (index < 0 || index == own_index) return "";
  std::string own = std::to_string(own_index), other = std::to_string(index);
  return "CUDA error: invalid device ordinal. This simulated process has one GPU, cuda:" + own + ", not cuda:" + other +
         "; `ligerprof run --device simulated --world N` gives each rank one.";
}
thread_local int64_t current_stream = 0;
std::atomic<int64_t> streams{0};

// Lets callbacks run while a Python exception is on its way, as where a hook of autograd has raised one.
struct Interpreter {
  int state = PyGILState_Ensure();
  void *kind, *value, *traceback;
  Interpreter() { PyErr_Fetch(&kind, &value, &traceback); }
  ~Interpreter() {
    PyErr_Restore(kind, value, traceback);
    PyGILState_Release(state);
  }
};

void synchronize(int64_t stream) {
  Callbacks* now = callbacks.load();
  if (!now) return;
  Interpreter interpreter;
  now->synchronize(stream);
}

void release(void* address) {
  Callbacks* now = callbacks.load();
  if (!now || !address) return;
  Interpreter interpreter;
  now->release(reinterpret_cast<uint64_t>(address));
}

void* take(Callbacks* now, size_t size_bytes, int64_t stream) {
  Interpreter interpreter;
  return reinterpret_cast<void*>(now->allocate(size_bytes, stream));
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size_bytes) override {
    Callbacks* now = callbacks.load();
    if (size_bytes == 0 || !now) return {nullptr, nullptr, &::release, gpu()};
    message.clear();
    void* address = take(now, size_bytes, current_stream);
    if (!address) {
      TORCH_CHECK(!message.empty(), "the simulated GPU failed to allocate ", size_bytes, " bytes");
      TORCH_CHECK_WITH(OutOfMemoryError, false, message);
    }
    return {address, address, &::release, gpu()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &::release; }
  void copy_data(void*, const void*, size_t) const override {}
};

// Page-locked memory of the host. Nothing is written to it, so the operating system hands out no pages.
struct PinnedMemory final : c10::Allocator {
  static std::mutex mutex;
  static std::map<uintptr_t, size_t> blocks;
  static int64_t held_bytes, highest_bytes;

  // at::CachingHostAllocator rounds up to a power of two
  static size_t rounded(size_t size_bytes) {
    size_t result = 1;
    while (result < size_bytes) result <<= 1;
    return result;
  }
  static void free_block(void* address) {
    if (!address) return;
    std::lock_guard<std::mutex> lock(mutex);
    auto found = blocks.find(reinterpret_cast<uintptr_t>(address));
    held_bytes -= rounded(found->second);
    blocks.erase(found);
    std::free(address);
  }
  c10::DataPtr allocate(size_t size_bytes) override {
    if (size_bytes == 0) return {nullptr, nullptr, &free_block, Device(DeviceType::CPU)};
    void* address = std::malloc(size_bytes);
    TORCH_CHECK(address, "no main memory for ", size_bytes, " page-locked bytes");
    std::lock_guard<std::mutex> lock(mutex);
    blocks[reinterpret_cast<uintptr_t>(address)] = size_bytes;
    held_bytes += rounded(size_bytes);
    highest_bytes = std::max(highest_bytes, held_bytes);
    return {address, address, &free_block, Device(DeviceType::CPU)};
  }
  static bool contains(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex);
    auto address = reinterpret_cast<uintptr_t>(pointer);
    auto after = blocks.upper_bound(address);
    return after != blocks.begin() && address < std::prev(after)->first + std::prev(after)->second;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void*, const void*, size_t) const override {}
};
std::mutex PinnedMemory::mutex;
std::map<uintptr_t, size_t> PinnedMemory::blocks;
int64_t PinnedMemory::held_bytes = 0, PinnedMemory::highest_bytes = 0;

// Tensors in main memory, counted from 1 MiB on, but for those that a program would map from a file.
struct HostMemory final : c10::Allocator {
  static constexpr size_t kCounted = 1 << 20;
  static std::mutex mutex;
  static std::unordered_map<void*, size_t> blocks;
  static int64_t held_bytes, highest_bytes;
  static c10::Allocator* real;
  static thread_local bool maps;

  static void release(void* address) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      auto found = blocks.find(address);
      if (found != blocks.end()) {
        held_bytes -= found->second;
        blocks.erase(found);
      }
    }
    real->raw_deallocate(address);
  }
  c10::DataPtr allocate(size_t size_bytes) override {
    void* address = real->raw_allocate(size_bytes);
    if (size_bytes >= kCounted && !maps) {
      std::lock_guard<std::mutex> lock(mutex);
      blocks[address] = size_bytes;
      held_bytes += size_bytes;
      highest_bytes = std::max(highest_bytes, held_bytes);
    }
    return {address, address, &release, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size_bytes) const override { default_copy_data(to, from, size_bytes); }
};
std::mutex HostMemory::mutex;
std::unordered_map<void*, size_t> HostMemory::blocks;
int64_t HostMemory::held_bytes = 0, HostMemory::highest_bytes = 0;
c10::Allocator* HostMemory::real = nullptr;
thread_local bool HostMemory::maps = false;

// A weight without values, of a file whose pages a program would map.
at::Tensor map_weight(c10::IntArrayRef shape, at::ScalarType dtype) {
  HostMemory::maps = true;
  at::Tensor made = at::detail::empty_cpu(shape, dtype);
  HostMemory::maps = false;
  return made;
}

DeviceMemory device_memory;
PinnedMemory pinned_memory;
HostMemory host_memory;

// Its state has the 16 bytes of CUDA's: a seed and an offset. If the state is one of those read last, restoring it repeats
// the numbers that were drawn after it was read.
struct Generator final : at::CPUGeneratorImpl {
  Generator() { device_ = gpu(); }
  void set_offset(uint64_t offset) override { restore(current_seed(), offset); }
  uint64_t get_offset() const override {
    at::mt19937_data_pod now = const_cast<Generator*>(this)->engine().data();
    if (states.empty() || states.rbegin()->second.left_ != now.left_ || states.rbegin()->second.state_ != now.state_) {
      uint64_t next = states.empty() ? 0 : states.rbegin()->first + 4;
      states[next] = now;
      if (states.size() > kStates) states.erase(states.begin());
      return next;
    }
    return states.rbegin()->first;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.itemsize() == 1, "RNG state is wrong size");
    std::array<uint64_t, 2> read;
    std::memcpy(read.data(), state.data(), sizeof read);
    restore(read[0], read[1]);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    std::array<uint64_t, 2> written{const_cast<Generator*>(this)->current_seed(), get_offset()};
    at::Tensor state = at::detail::empty_cpu({sizeof written}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), written.data(), sizeof written);
    return state.getIntrusivePtr();
  }
  // compiled code keeps a state as a generator of its own
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::intrusive_ptr<c10::GeneratorImpl>::reclaim(clone_impl());
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    set_engine(static_cast<Generator&>(*other).engine());
  }

 private:
  Generator* clone_impl() const override {
    auto copy = c10::make_intrusive<Generator>();
    copy->set_engine(const_cast<Generator*>(this)->engine());
    copy->states = states;
    return copy.release();
  }
  static constexpr size_t kStates = 1024;
  mutable std::map<uint64_t, at::mt19937_data_pod> states;

  void restore(uint64_t seed, uint64_t offset) {
    auto known = states.find(offset);
    at::mt19937 engine(seed + offset);
    at::mt19937_data_pod data = engine.data();
    if (known != states.end() && known->second.seed_ == seed) data = known->second;
    data.seed_ = seed;
    engine.set_data(data);
    set_engine(engine);
  }
};

Stream stream_of(int64_t number) { return Stream(Stream::UNSAFE, gpu(), number); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return gpu(); }
  Device getDevice() const override { return gpu(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return stream_of(current_stream); }
  Stream getDefaultStream(Device) const override { return stream_of(0); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream_of(++streams); }
  Stream getNewStream(Device, int) const override { return stream_of(++streams); }
  Stream exchangeStream(Stream stream) const override {
    int64_t before = current_stream;
    current_stream = stream.id();
    return stream_of(before);
  }
  DeviceIndex deviceCount() const noexcept override { return node_count; }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(stream.id() + 1);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& stream) const override { ::synchronize(stream.id()); }
  void synchronizeEvent(void* event) const override {
    if (event) ::synchronize(reinterpret_cast<int64_t>(event) - 1);
  }
  void synchronizeDevice(const DeviceIndex) const override { ::synchronize(-1); }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool hasCuSOLVER() const override { return true; }
  bool hasCuBLASLt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return node_count; }
  DeviceIndex getCurrentDevice() const override { return own_index; }
  DeviceIndex current_device() const override { return own_index; }
  int getNumGPUs() const override { return node_count; }
  Device getDeviceFromPtr(void*) const override { return gpu(); }
  bool isPinnedPtr(const void* pointer) const override { return PinnedMemory::contains(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  bool compiledWithCuDNN() const override { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  bool supportsBFloat16RNNWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return 91900; }
  long versionRuntimeCuDNN() const override { return 91900; }
  long versionCuDNNFrontend() const override { return 11500; }
  long versionCUDART() const override { return 13000; }
  double batchnormMinEpsilonCuDNN() const override { return 0.0; }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<Generator>(); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    static at::Generator generator = at::make_generator<Generator>();
    return generator;
  }
  void deviceSynchronize(DeviceIndex) const override { ::synchronize(-1); }
};

Guard guard;

void require_own(std::optional<Device> device) {
  if (!device) return;
  std::string problem = claim(device->index());
  TORCH_CHECK(problem.empty(), problem);
}

at::Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  require_own(device);
  auto type = dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  return at::detail::empty_generic(
      sizes, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), type, format);
}

at::Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  require_own(device);
  auto type = dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  return at::detail::empty_strided_generic(
      sizes, strides, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), type);
}

// As resize_bytes_cuda: the new memory is there before the old is returned.
void resize_storage(c10::StorageImpl* storage, size_t size_bytes) {
  c10::DataPtr memory = device_memory.allocate(size_bytes);
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(size_bytes);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  c10::TensorImpl* tensor = self.unsafeGetTensorImpl();
  if (self.sizes() != sizes || format) tensor->set_sizes_contiguous(sizes);
  if (format) tensor->empty_tensor_restride(*format);
  size_t needed = (self.storage_offset() + self.numel()) * self.itemsize();
  c10::StorageImpl* storage = self.storage().unsafeGetStorageImpl();
  if (self.numel() > 0 && needed > storage->nbytes()) resize_storage(storage, needed);
  return self;
}

// The CPU's kernels of these operators look at sizes and strides alone; CUDA has the same ones.
void as_on_cpu(const c10::OperatorHandle& operation, c10::DispatchKeySet, torch::jit::Stack* stack) {
  operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}
const char* const kViews[] = {
    "as_strided", "view", "view.dtype", "_reshape_alias", "unfold", "view_as_real", "view_as_complex",
    "set_", "set_.source_Tensor", "set_.source_Storage", "set_.source_Storage_storage_offset", "is_set_to"};

// Weights in main memory have no values: nothing is read from files, and the operating system hands out no pages.
// Weights are large floats that an initializer fills, that a file holds, or that are copied from such ones or from the
// GPU. What else the program computes has its values.
constexpr size_t kWeightBytes = 4 << 20;
bool is_large(const at::Tensor& tensor) {
  return tensor.is_floating_point() && tensor.layout() == at::kStrided && tensor.nbytes() >= kWeightBytes;
}
struct Weights {
  static std::mutex mutex;
  static std::unordered_map<c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
  static size_t most;

  static bool contains(const at::Tensor& tensor) {
    if (!tensor.has_storage()) return false;
    std::lock_guard<std::mutex> lock(mutex);
    auto found = storages.find(tensor.storage().unsafeGetStorageImpl());
    return found != storages.end() && !found->second.expired();
  }
  static void add(const at::Tensor& tensor) {
    std::lock_guard<std::mutex> lock(mutex);
    auto storage = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl());
    storages.insert_or_assign(storage.get(), c10::weak_intrusive_ptr<c10::StorageImpl>(storage));
    if (storages.size() < most) return;
    std::erase_if(storages, [](const auto& item) { return item.second.expired(); });
    most = 2 * storages.size() + 1024;
  }
  static void remove(const at::Tensor& tensor) {
    std::lock_guard<std::mutex> lock(mutex);
    storages.erase(tensor.storage().unsafeGetStorageImpl());
  }
};
std::mutex Weights::mutex;
std::unordered_map<c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> Weights::storages;
size_t Weights::most = 1024;

bool covers(const at::Tensor& tensor) { return tensor.nbytes() >= tensor.storage().nbytes(); }
void mark_weight(const at::Tensor& tensor) {
  if (covers(tensor)) Weights::add(tensor);
}
// Whether an initializer fills a parameter. Its `data` shares a storage; a tensor that was just made has one of its own.
bool is_drawn_weight(const at::Tensor& tensor) {
  return is_large(tensor) && (tensor.requires_grad() || tensor.storage().use_count() > 1 ||
                              Weights::contains(tensor));
}
at::Tensor& copy_on_host(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (is_large(self)) {
    if (self.sizes() == source.sizes() && Weights::contains(source)) {
      mark_weight(self);
      return self;
    }
    if (covers(self)) Weights::remove(self);
  }
  return at::native::copy_(self, source, non_blocking);
}
// The state of a Mersenne twister after its next 624 numbers.
void twist(std::array<uint32_t, at::MERSENNE_STATE_N>& state) {
  constexpr int count = at::MERSENNE_STATE_N, ahead = at::MERSENNE_STATE_M;
  auto mixed = [&](int here, int next) {
    uint32_t both = (state[here] & 0x80000000u) | (state[next] & 0x7fffffffu);
    return (both >> 1) ^ (-(state[next] & 1u) & 0x9908b0dfu);
  };
  for (int i = 0; i < count - ahead; ++i) state[i] = state[i + ahead] ^ mixed(i, i + 1);
  for (int i = count - ahead; i < count - 1; ++i) state[i] = state[i + ahead - count] ^ mixed(i, i + 1);
  state[count - 1] = state[ahead - 1] ^ mixed(count - 1, 0);
}
// Polynomials over the field of two elements, lowest coefficient first; kDegree is that of the twister's recurrence.
constexpr int kDegree = 19937, kWords = kDegree / 64 + 1;
using Polynomial = std::vector<uint64_t>;
bool coefficient(const Polynomial& polynomial, int index) { return polynomial[index >> 6] >> (index & 63) & 1; }
// target += source * t^shift
void add_shifted(Polynomial& target, const Polynomial& source, int shift) {
  int words = shift >> 6, bits = shift & 63;
  for (size_t i = 0; i < source.size() && i + words < target.size(); ++i) {
    target[i + words] ^= source[i] << bits;
    if (bits && i + words + 1 < target.size()) target[i + words + 1] ^= source[i] >> (64 - bits);
  }
}
// The recurrence that every bit of a Mersenne twister follows, found from one of its bits (Berlekamp and Massey).
Polynomial recurrence() {
  constexpr int count = 2 * kDegree;
  std::array<uint32_t, at::MERSENNE_STATE_N> state;
  for (int i = 0; i < at::MERSENNE_STATE_N; ++i) state[i] = 0x9e3779b9u * (i + 1);
  // the newest bit is the lowest, as in the product with the connection polynomial
  Polynomial bits(kWords + 1), current(kWords + 1), last(kWords + 1);
  current[0] = last[0] = 1;
  int length = 0, since = 1;
  for (int n = 0; n < count; ++n, ++since) {
    if (n % at::MERSENNE_STATE_N == 0) twist(state);
    for (int i = kWords; i > 0; --i) bits[i] = bits[i] << 1 | bits[i - 1] >> 63;
    bits[0] = bits[0] << 1 | (state[n % at::MERSENNE_STATE_N] & 1);
    uint64_t difference = 0;
    for (int i = 0; i <= kWords; ++i) difference ^= bits[i] & current[i];
    if (!(std::popcount(difference) & 1)) continue;
    Polynomial before = 2 * length <= n ? current : Polynomial();
    add_shifted(current, last, since);
    if (before.empty()) continue;
    length = n + 1 - length;
    last = std::move(before);
    since = 0;
  }
  // the connection polynomial is the reversed one
  Polynomial result(kWords);
  for (int i = 0; i <= kDegree; ++i)
    if (coefficient(current, i)) result[(kDegree - i) >> 6] |= 1ull << ((kDegree - i) & 63);
  return result;
}
// t^exponent modulo the recurrence
Polynomial power(uint64_t exponent) {
  // its multiples by t^0 to t^63
  static const std::vector<Polynomial> multiples = [] {
    std::vector<Polynomial> shifted(64, Polynomial(kWords + 1));
    Polynomial polynomial = recurrence();
    for (int i = 0; i < 64; ++i) add_shifted(shifted[i], polynomial, i);
    return shifted;
  }();
  Polynomial result(kWords);
  result[0] = 1;
  for (int bit = std::bit_width(exponent) - 1; bit >= 0; --bit) {
    Polynomial square(2 * kWords + 2);
    int factor = exponent >> bit & 1;
    for (int i = 0; i < kDegree; ++i)
      if (coefficient(result, i)) square[(2 * i + factor) >> 6] |= 1ull << ((2 * i + factor) & 63);
    for (int i = 2 * kDegree; i >= kDegree; --i) {
      if (!coefficient(square, i)) continue;
      const Polynomial& multiple = multiples[(i - kDegree) & 63];
      uint64_t* from = &square[(i - kDegree) >> 6];
      for (int j = 0; j <= kWords; ++j) from[j] ^= multiple[j];
    }
    square.resize(kWords);
    result = std::move(square);
  }
  return result;
}
// The state after so many twists, but for bits that the next twist does not read. It is the polynomial of the power
// applied to the state (Haramoto and others, Efficient jump ahead for F2-linear random number generators, 2008).
void twist_often(std::array<uint32_t, at::MERSENNE_STATE_N>& state, uint64_t times) {
  constexpr int count = at::MERSENNE_STATE_N;
  constexpr uint64_t few = 1 << 14;
  if (times < few) {
    for (; times > 0; --times) twist(state);
    return;
  }
  static std::mutex mutex;
  static std::map<uint64_t, Polynomial> powers;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = powers.find(times);
  if (found == powers.end()) found = powers.emplace(times, power(times * count)).first;
  std::vector<uint32_t> words(count + kDegree);
  uint32_t* at = words.data();
  for (int i = kDegree - 1; i >= 0; --i) {
    if (i < kDegree - 1) {
      uint32_t both = (at[0] & 0x80000000u) | (at[1] & 0x7fffffffu);
      at[count] = at[at::MERSENNE_STATE_M] ^ (both >> 1) ^ (-(at[1] & 1u) & 0x9908b0dfu);
      ++at;
    }
    if (!coefficient(found->second, i)) continue;
    for (int j = 0; j < count; ++j) at[j] ^= state[j];
  }
  std::copy(at, at + count, state.begin());
}
// What the program draws after the weights, such as the order of its data, is what it would be if they had values.
void skip_numbers(const std::optional<at::Generator>& generator, uint64_t count) {
  auto* used = at::get_generator_or_default<at::CPUGeneratorImpl>(generator, at::detail::getDefaultCPUGenerator());
  std::lock_guard<std::mutex> lock(used->mutex_);
  at::mt19937 engine = used->engine();
  at::mt19937_data_pod data = engine.data();
  uint64_t left = data.left_ - 1;
  if (count > left) {
    uint64_t times = (count - left - 1) / at::MERSENNE_STATE_N;
    count -= left + times * at::MERSENNE_STATE_N;
    twist_often(data.state_, times);
    twist(data.state_);
    data.left_ = at::MERSENNE_STATE_N + 1;
    data.next_ = 0;
  }
  data.left_ -= count;
  data.next_ += count;
  engine.set_data(data);
  used->set_engine(engine);
}
// Skips the numbers of a weight but for those of its last values, for which it gives a tensor to draw: how many torch
// takes for an incomplete row of 16 differs.
at::Tensor last_values(const at::Tensor& weight, bool by_row, const std::optional<at::Generator>& generator) {
  int64_t last = 16 + weight.numel() % 16;
  bool is_long = weight.scalar_type() == at::kDouble || (by_row && !weight.is_contiguous());
  skip_numbers(generator, (weight.numel() - last) * (is_long ? 2 : 1));
  at::Tensor values = at::detail::empty_cpu({2 * last}, weight.options());
  return weight.is_contiguous() ? values.narrow(0, 0, last) : values.slice(0, 0, 2 * last, 2);
}
at::Tensor& normal_on_host(at::Tensor& self, double mean, double std, std::optional<at::Generator> generator) {
  if (!is_drawn_weight(self)) return at::native::normal_(self, mean, std, generator);
  at::Tensor last = last_values(self, true, generator);
  at::native::normal_(last, mean, std, generator);
  mark_weight(self);
  return self;
}
at::Tensor& uniform_on_host(at::Tensor& self, double from, double to, std::optional<at::Generator> generator) {
  if (!is_drawn_weight(self)) return at::native::uniform_(self, from, to, generator);
  at::Tensor last = last_values(self, false, generator);
  at::native::uniform_(last, from, to, generator);
  mark_weight(self);
  return self;
}
at::Tensor& fill_on_host(at::Tensor& self, const at::Scalar& value) {
  if (is_large(self) && covers(self)) Weights::remove(self);
  return at::native::fill_(self, value);
}
// Pages that the process gives back to the operating system are zero afterwards.
at::Tensor& zero_on_host(at::Tensor& self) {
  if (!is_large(self)) return at::native::zero_(self);
  if (covers(self)) Weights::remove(self);
  auto deleter = self.storage().data_ptr().get_deleter();
  bool is_ours = deleter == c10::GetAllocator(DeviceType::CPU)->raw_deleter() || deleter == pinned_memory.raw_deleter();
  if (!is_ours || !self.is_contiguous()) return at::native::zero_(self);
  auto begin = reinterpret_cast<uintptr_t>(self.mutable_data_ptr()), end = begin + self.nbytes();
  uintptr_t page = sysconf(_SC_PAGESIZE), first = (begin + page - 1) / page * page, last = end / page * page;
  if (madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED)) return at::native::zero_(self);
  std::memset(reinterpret_cast<void*>(begin), 0, first - begin);
  std::memset(reinterpret_cast<void*>(last), 0, end - last);
  return self;
}

// Of DistributedDataParallel's log: the times when the host came by.
struct HostTimer final : c10d::Timer {
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto first = getTimestamp(start), last = getTimestamp(end);
    if (!first || !last) return std::nullopt;
    return *last - *first;
  }
};

// torch warns once about a kernel that replaces another, as some of these do on purpose
struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

extern "C" {

void gpu_install(Allocate allocate, Release release_block, Synchronize wait) {
  callbacks = new Callbacks{allocate, release_block, wait};
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
  c10::SetAllocator(DeviceType::CUDA, &device_memory, 255);
  // torch made its own object when it was imported; neither has members
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks;
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard quiet(&silent);
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("resize_", TORCH_FN(resize_));
  static torch::Library host(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  host.impl("copy_", TORCH_FN(copy_on_host));
  host.impl("normal_", TORCH_FN(normal_on_host));
  host.impl("uniform_", TORCH_FN(uniform_on_host));
  host.impl("fill_.Scalar", TORCH_FN(fill_on_host));
  host.impl("zero_", TORCH_FN(zero_on_host));
  static torch::Library own(torch::Library::DEF, "simulated_gpu", std::nullopt, __FILE__, __LINE__);
  own.def("is_weight", &Weights::contains);
  own.def("mark_weight", &mark_weight);
  own.def("map_weight", &map_weight);
  HostMemory::real = c10::GetAllocator(DeviceType::CPU);
  c10::SetAllocator(DeviceType::CPU, &host_memory, 255);
  c10d::TimerRegistry()->Register(
      DeviceType::CUDA, [](Device) { return std::unique_ptr<c10d::Timer>(new HostTimer); }, c10::REGISTRY_PREFERRED);
  for (const char* name : kViews) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&as_on_cpu>());
}

// Storages that end after Python's interpreter are not reported.
void gpu_detach() { callbacks = nullptr; }

// Resizes the storage at UntypedStorage._cdata; false if memory ran out.
bool gpu_resize_storage(void* storage, uint64_t size_bytes) {
  try {
    resize_storage(static_cast<c10::StorageImpl*>(storage), size_bytes);
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

void gpu_ran_out(const char* text) { message = text; }
// Says which of the node's GPUs this process has unless it names another one first.
void gpu_place(int64_t index, int64_t count) {
  own_index = static_cast<DeviceIndex>(index);
  node_count = static_cast<DeviceIndex>(count);
}
int64_t gpu_index() { return own_index; }
int64_t gpu_count() { return node_count; }
// Null if the process has the GPU of this index.
const char* gpu_claim(int64_t index) {
  message = claim(index);
  return message.empty() ? nullptr : message.c_str();
}
int64_t gpu_stream() { return current_stream; }
void gpu_set_stream(int64_t stream) { current_stream = stream; }
int64_t gpu_new_stream() { return ++streams; }
int64_t gpu_highest_pinned_bytes() { return PinnedMemory::highest_bytes; }
int64_t gpu_highest_host_bytes() { return HostMemory::highest_bytes; }
}
