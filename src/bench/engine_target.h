#pragma once

#include "src/bench/target.h"
#include "vivace/engine.h"

namespace vivace::bench {

/// An engine of this process; it must outlive the target.
class EngineTarget : public Target {
 public:
  explicit EngineTarget(Engine& engine) : engine_(engine) {}
  Status start(const LoadRequest& request, Sink sink) override;

 private:
  Engine& engine_;
};

}  // namespace vivace::bench
