#pragma once

#include "apps/vivace/arguments.h"

// One function per command; each returns the exit code.

namespace vivace::cli {

int run(const GenerateArgs& args);
int run(const ScoreArgs& args);
int run(const TokenizeArgs& args);
int run(const QuantizeArgs& args);
int run(const ServeArgs& args);
int run(const BenchServeArgs& args);
int run(const BenchOpsArgs& args);
int run(const BenchStepArgs& args);
int run(const OpsArgs& args);
int run(const OpsExplainArgs& args);
int run(const OpsScheduleArgs& args);
int run(const DoctorArgs& args);

}  // namespace vivace::cli
