#include "vivace/c_api.h"

#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <system_error>

#include "src/c_api/read.h"
#include "src/core/guard.h"
#include "src/core/json_string.h"
#include "src/cpu/machine.h"
#include "src/cpu/thread_pool.h"
#include "src/device/build_info.h"
#include "src/device/runtime.h"

struct vivace_context {
  struct Threads {
    explicit Threads(int count) : pool(count) {}
    vivace::cpu::ThreadPool pool;
    std::mutex turn;  ///< of calls on the threads
  };
  vivace::Dispatch dispatch;
  std::shared_ptr<Threads> threads;
};

namespace vivace::c_api {
namespace {

thread_local std::string last_error, last_text;

/// What a function of C gives back for what `body`, which returns a Status, did. No exception passes.
template <class Body>
vivace_code call(std::string_view place, Body&& body) noexcept {
  try {
    Status status = guarded(place, body);
    if (status.ok()) return VIVACE_OK;
    last_error = status.message();
    return static_cast<vivace_code>(status.code());
  } catch (...) {  // no memory for the message
    last_error.clear();
    return VIVACE_OUT_OF_MEMORY;
  }
}

template <class T>
Status check_out(std::string_view place, std::string_view name, T* out) {
  return out != nullptr ? Status() : invalid_argument("{}: {} is null", place, name);
}

/// What a function of C is for.
enum class Use {
  call,   ///< runs on the stream
  query,  ///< asks about a call on the stream, whose GPU need not be there if its compute capability is said
  anywhere,  ///< asks what does not depend on where the call runs
};

/// `stream.compute_capability` of a GPU that is there. `whose` says who means it, and begins the message of a query about one that is not.
template <class Whose>
Status ask_compute_capability(Stream& stream, Use use, const Whose& whose) {
  const auto info = device::device_info(stream.ordinal);
  if (info.ok()) {
    stream.compute_capability = 10 * (*info)->major + (*info)->minor;
    return {};
  }
  if (use == Use::call) return info.status();
  return error(
      info.status().code(),
      "{}: {}; to ask about a GPU that is not here, give a stream with its compute_capability, such as 90",
      whose(), info.status().message());
}

/// The stream of C++ for one of C.
Status read_stream(std::string_view place, const vivace_stream* from, Use use, Stream& stream) {
  if (from == nullptr) return {};
  if (from->device != VIVACE_DEVICE_CPU && from->device != VIVACE_DEVICE_CUDA) {
    return invalid_argument("{}: stream.device is {}, needs 0 (cpu) or 1 (cuda)", place, from->device);
  }
  if (from->reserved != 0)
    return invalid_argument("{}: stream.reserved is {}, needs 0", place, from->reserved);
  stream.device = static_cast<Device>(from->device);
  if (from->context != nullptr) {
    stream.threads = &from->context->threads->pool;
    stream.dispatch = &from->context->dispatch;
  }
  if (stream.device == Device::cpu) return {};
  stream.ordinal = from->ordinal;
  stream.handle = from->handle;
  stream.compute_capability = from->compute_capability;
  if (use == Use::query && from->compute_capability != 0) {
    stream.ordinal = device::device_count() > from->ordinal ? from->ordinal : -1;
    return {};
  }
  return ask_compute_capability(stream, use, [&] { return place; });
}

/// The stream that a question without one is about: where the first tensor lies.
Status stream_beside(std::string_view place, const Reader::Named& first, Use use, Stream& stream) {
  if (first.tensor == nullptr || first.tensor->device == VIVACE_DEVICE_CPU) return {};
  stream.device = Device::cuda;
  if (use == Use::anywhere) return {};
  stream.ordinal = first.tensor->ordinal;
  return ask_compute_capability(stream, use, [&] {
    return fmt::format("{}: stream is null, and {} lies on a GPU", place, first.name);
  });
}

/// Runs `body` with the arguments and the stream as C++ has them.
template <class Args, class Body>
vivace_code with(std::string_view place, const Args* given, const vivace_stream* from, Use use,
                 Body&& body) noexcept {
  return call(place, [&]() -> Status {
    Args copy;
    const Args* args = nullptr;
    VIVACE_TRY(current_args(place, given, copy, args));
    Stream stream;
    VIVACE_TRY(read_stream(place, from, use, stream));
    const bool runs = use == Use::call;
    Reader reader(place, from != nullptr && stream.device == Device::cuda && runs ? from->ordinal : -1);
    const auto ours = read(reader, *args);
    VIVACE_TRY(reader.status());
    if (runs) VIVACE_TRY(reader.apart());
    if (!runs && from == nullptr) {
      VIVACE_TRY(stream_beside(place, reader.first(), use, stream));
    }
    std::unique_lock<std::mutex> turn;
    if (stream.threads != nullptr && stream.device == Device::cpu && runs) {
      turn = std::unique_lock(from->context->threads->turn);
    }
    return body(ours, stream);
  });
}

template <class Args, class Run>
vivace_code run(std::string_view place, const Args* args, const vivace_stream* stream,
                Run operation) noexcept {
  return with(place, args, stream, Use::call,
              [&](const auto& ours, const Stream& on) -> Status { return operation(ours, on); });
}

/// What the call would be refused for, whichever rows there are: a question about it is refused in the same words.
template <class Args, class Run>
Status check_call(const Args& args, Stream stream, Run operation) {
  stream.check_only = true;
  Status status = operation(args, stream);
  return status.code() == Code::unsupported ? Status() : status;
}

template <class Args, class CostOf, class Run>
vivace_code cost(std::string_view place, const Args* args, vivace_cost* out, CostOf cost_of,
                 Run operation) noexcept {
  return with(place, args, nullptr, Use::anywhere, [&](const auto& ours, const Stream& on) -> Status {
    VIVACE_TRY(check_out(place, "cost", out));
    VIVACE_TRY(check_call(ours, on, operation));
    const Cost found = cost_of(ours);
    *out = {found.bytes, found.flops};
    return {};
  });
}

/// What is wrong with a flag of the program, as what is wrong with the field of its name.
Status of_field(std::string_view place, const Status& status) {
  std::string_view message = status.message();
  if (message.starts_with("--")) message.remove_prefix(2);
  return status.ok() ? status : error(status.code(), "{}: {}", place, message);
}

Result<std::shared_ptr<vivace_context::Threads>> start_threads(std::string_view place, int64_t threads) {
  try {
    return std::make_shared<vivace_context::Threads>(static_cast<int>(threads));
  } catch (const std::system_error& refused) {
    return error(Code::resource_exhausted, "{}: threads is {}, more than the system starts now: {}", place,
                 threads, refused.what());
  }
}

Status give_text(std::string text, const char** json) {
  last_text = std::move(text);
  *json = last_text.c_str();
  return {};
}

/// {"name": "text", ...} piece by piece.
void append_field(std::string& out, std::string_view name, std::string_view text) {
  append_json_string(out, name);
  out += ": ";
  append_json_string(out, text);
}

std::string to_json(const Choice& choice) {
  std::string out = "{\"row\": ";
  if (choice.row.empty()) {
    out += "null";
  } else {
    append_json_string(out, choice.row);
  }
  out += ", \"refused\": [";
  for (const Refusal& refusal : choice.refused) {
    out += out.back() == '[' ? "{" : ", {";
    append_field(out, "row", refusal.row);
    out += ", ";
    append_field(out, "reason", refusal.reason);
    out += '}';
  }
  return out + "]}";
}

template <class Args, class Explain, class Run>
vivace_code explain(std::string_view place, const Args* args, const vivace_stream* stream, const char** json,
                    Explain explain_call, Run operation) noexcept {
  return with(place, args, stream, Use::query, [&](const auto& ours, const Stream& on) -> Status {
    VIVACE_TRY(check_out(place, "json", json));
    VIVACE_TRY(check_call(ours, on, operation));
    return give_text(to_json(explain_call(ours, on)), json);
  });
}

template <class Args, class Bytes, class Run>
vivace_code workspace_bytes(std::string_view place, const Args* args, const vivace_stream* stream,
                            int64_t* out, Bytes bytes_of, Run operation) noexcept {
  return with(place, args, stream, Use::query, [&](const auto& ours, const Stream& on) -> Status {
    VIVACE_TRY(check_out(place, "bytes", out));
    VIVACE_TRY(check_call(ours, on, operation));
    VIVACE_TRY_ASSIGN(*out, bytes_of(ours, on));
    return {};
  });
}

std::string operators_json() {
  std::string out = "[";
  for (const OpInfo& op : operators()) {
    out += out.back() == '[' ? "{" : ", {";
    append_field(out, "op", op.name);
    out += ", ";
    append_field(out, "summary", op.summary);
    out += ", \"rows\": [";
    for (const RowInfo& row : op.rows) {
      out += out.back() == '[' ? "{" : ", {";
      append_field(out, "row", row.name);
      out += ", ";
      append_field(out, "device", name_of(row.device));
      out += ", \"needs\": [";
      for (const Need& need : row.needs) {
        if (out.back() != '[') out += ", ";
        append_json_string(out, describe(need, nullptr));
      }
      out += "], ";
      append_field(out, "summary", row.summary);
      out += '}';
    }
    out += "]}";
  }
  return out + "]";
}

std::string build_json() {
  const device::BuildInfo build = device::build_info();
  std::string why, out = "{";
  const int devices = device::device_count(&why);
  append_field(out, "version", VIVACE_VERSION);
  out += fmt::format(", \"cuda\": {}, ", build.cuda);
  append_field(out, "runtime", build.runtime);
  out += ", ";
  append_field(out, "driver", build.driver);
  out += ", ";
  append_field(out, "code", build.code);
  out += ", \"devices\": [";
  for (int i = 0; i < devices; ++i) {
    const auto info = device::device_info(i);
    if (!info.ok()) continue;
    out += out.back() == '[' ? "{" : ", {";
    append_field(out, "name", (*info)->name);
    out += fmt::format(", \"compute_capability\": {}, \"sms\": {}, \"memory_bytes\": {}}}",
                       10 * (*info)->major + (*info)->minor, (*info)->sms, (*info)->memory_bytes);
  }
  out += "], ";
  append_field(out, "why_no_device", why);
  return out + "}";
}

}  // namespace
}  // namespace vivace::c_api

namespace c_api = vivace::c_api;

extern "C" {

int32_t vivace_abi_version(void) {
  return VIVACE_ABI_VERSION;
}

const char* vivace_version(void) {
  return VIVACE_VERSION;
}

const char* vivace_last_error(void) {
  return c_api::last_error.c_str();
}

vivace_code vivace_context_create(const vivace_context_options* options, vivace_context** context) {
  constexpr const char* kPlace = "vivace_context_create";
  return c_api::call(kPlace, [&]() -> vivace::Status {
    vivace_context_options copy{};
    const vivace_context_options* wanted = &copy;
    if (options != nullptr) VIVACE_TRY(c_api::current_args(kPlace, options, copy, wanted));
    VIVACE_TRY(c_api::check_out(kPlace, "context", context));
    constexpr int64_t kMostThreads = 1024;
    c_api::Reader reader(kPlace, -1);
    int64_t threads = reader.number("threads", wanted->threads, 0, kMostThreads);
    VIVACE_TRY(reader.status());
    if (threads != 0 && wanted->threads_of != nullptr) {
      return vivace::invalid_argument("{}: threads is {} with threads_of, needs 0", kPlace, threads);
    }
    if (threads == 0) threads = vivace::cpu::usable_cores();
    auto made = std::make_unique<vivace_context>();
    if (wanted->prefer != nullptr) {
      VIVACE_TRY(c_api::of_field(kPlace, made->dispatch.prefer(wanted->prefer)));
    }
    if (wanted->threads_of != nullptr) {
      made->threads = wanted->threads_of->threads;
    } else {
      VIVACE_TRY_ASSIGN(made->threads, c_api::start_threads(kPlace, threads));
    }
    *context = made.release();
    return {};
  });
}

void vivace_context_destroy(vivace_context* context) {
  delete context;
}

vivace_code vivace_context_counts(const vivace_context* context, const char** json) {
  constexpr const char* kPlace = "vivace_context_counts";
  return c_api::call(kPlace, [&]() -> vivace::Status {
    VIVACE_TRY(c_api::check_out(kPlace, "context", context));
    VIVACE_TRY(c_api::check_out(kPlace, "json", json));
    std::string out = "[";
    for (const vivace::RowCount& count : context->dispatch.counts()) {
      out += out.back() == '[' ? "{" : ", {";
      c_api::append_field(out, "op", count.op);
      out += ", ";
      c_api::append_field(out, "row", count.row);
      out += fmt::format(", \"calls\": {}}}", count.calls);
    }
    return c_api::give_text(out + "]", json);
  });
}

vivace_code vivace_operators(const char** json) {
  return c_api::call("vivace_operators", [&]() -> vivace::Status {
    VIVACE_TRY(c_api::check_out("vivace_operators", "json", json));
    return c_api::give_text(c_api::operators_json(), json);
  });
}

vivace_code vivace_build(const char** json) {
  return c_api::call("vivace_build", [&]() -> vivace::Status {
    VIVACE_TRY(c_api::check_out("vivace_build", "json", json));
    return c_api::give_text(c_api::build_json(), json);
  });
}

// The three functions that every operator has, and the fourth of some.
#define VIVACE_C_OPERATOR(op)                                                                    \
  vivace_code vivace_##op(const vivace_##op##_args* args, const vivace_stream* stream) {         \
    return c_api::run(#op, args, stream, vivace::op);                                            \
  }                                                                                              \
  vivace_code vivace_##op##_cost(const vivace_##op##_args* args, vivace_cost* cost) {            \
    return c_api::cost(#op, args, cost, vivace::op##_cost, vivace::op);                          \
  }                                                                                              \
  vivace_code vivace_##op##_explain(const vivace_##op##_args* args, const vivace_stream* stream, \
                                    const char** json) {                                         \
    return c_api::explain(#op, args, stream, json, vivace::op##_explain, vivace::op);            \
  }
#define VIVACE_C_WORKSPACE(op)                                                                           \
  vivace_code vivace_##op##_workspace_bytes(const vivace_##op##_args* args, const vivace_stream* stream, \
                                            int64_t* bytes) {                                            \
    return c_api::workspace_bytes(#op, args, stream, bytes, vivace::op##_workspace_bytes, vivace::op);   \
  }

VIVACE_C_OPERATOR(rms_norm)
VIVACE_C_OPERATOR(linear)
VIVACE_C_WORKSPACE(linear)
VIVACE_C_OPERATOR(embedding)
VIVACE_C_OPERATOR(attention_prologue)
VIVACE_C_OPERATOR(attention_prefill)
VIVACE_C_OPERATOR(attention_decode)
VIVACE_C_WORKSPACE(attention_decode)
VIVACE_C_OPERATOR(decode_schedule)
VIVACE_C_OPERATOR(router_gemm)
VIVACE_C_OPERATOR(route_top_k)
VIVACE_C_OPERATOR(choose_experts)
VIVACE_C_WORKSPACE(choose_experts)
VIVACE_C_OPERATOR(fused_moe)
VIVACE_C_WORKSPACE(fused_moe)
VIVACE_C_OPERATOR(grouped_gemm)
VIVACE_C_OPERATOR(silu_mul)
VIVACE_C_OPERATOR(quantize_fp8)
VIVACE_C_OPERATOR(sampler)
VIVACE_C_WORKSPACE(sampler)

vivace_code vivace_attention_decode_schedule_params(const vivace_attention_decode_args* args,
                                                    const vivace_stream* stream,
                                                    vivace_decode_schedule_params* params) {
  constexpr const char* kPlace = "attention_decode";
  return c_api::with(
      kPlace, args, stream, c_api::Use::query,
      [&](const vivace::AttentionDecodeArgs& ours, const vivace::Stream& on) -> vivace::Status {
        VIVACE_TRY(c_api::check_out(kPlace, "params", params));
        VIVACE_TRY_ASSIGN(const vivace::DecodeScheduleParams found,
                          vivace::attention_decode_schedule_params(ours, on));
        *params = {found.heads_kv,     found.tile_tokens, found.workers,    found.min_tiles,
                   found.request_cost, found.window,      found.piece_tiles};
        return {};
      });
}

int64_t vivace_decode_schedule_ints(int64_t max_requests, int64_t workers) {
  return vivace::decode_schedule_ints(max_requests, workers);
}

vivace_code vivace_router_weight_bytes(const vivace_router_weight_source* source, int64_t* bytes) {
  constexpr const char* kPlace = "router_weight_bytes";
  return c_api::with(kPlace, source, nullptr, c_api::Use::anywhere,
                     [&](const vivace::RouterWeightSource& ours, const vivace::Stream&) -> vivace::Status {
                       VIVACE_TRY(c_api::check_out(kPlace, "bytes", bytes));
                       *bytes = vivace::router_weight_bytes(ours);
                       return {};
                     });
}

vivace_code vivace_prepare_router_weight(const vivace_router_weight_source* source,
                                         vivace_router_weight* weight) {
  constexpr const char* kPlace = "prepare_router_weight";
  return c_api::with(kPlace, source, nullptr, c_api::Use::anywhere,
                     [&](const vivace::RouterWeightSource& ours, const vivace::Stream&) -> vivace::Status {
                       VIVACE_TRY(c_api::check_out(kPlace, "weight", weight));
                       VIVACE_TRY_ASSIGN(const vivace::RouterWeight made,
                                         vivace::prepare_router_weight(ours));
                       *weight = {};
                       for (int i = 0; i < made.term_count; ++i) {
                         weight->terms[i] = c_api::written(made.terms[i], 0);
                       }
                       weight->term_count = made.term_count;
                       weight->scaled = made.scaled;
                       weight->mode = static_cast<int64_t>(made.mode);
                       weight->version = made.version;
                       return {};
                     });
}

}  // extern "C"
