// The commands of the program, one file each. Every one prints its own results and errors and returns the exit code.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/options.h"

namespace kvcell::cli {

// `run --samples N`: as RunCommand, with N answers.
int SamplesCommand(const Options& options, const std::string& prompt);
int RunCommand(const Options& options, SamplerGiven sampler_given);
int ChatCommand(const Options& options, SamplerGiven sampler_given);

int SessionsListCommand(const Options& options);
int SessionsShowCommand(const Options& options, const std::string& name);
int SessionsRemoveCommand(const Options& options, const std::vector<std::string>& names, bool erase);
int SessionsExportCommand(const Options& options, const std::string& name, const std::string& path);
int SessionsImportCommand(const Options& options, const std::string& path, const std::string& as);

int PlanCommand(const Options& options);
int InspectCommand(const Options& options);
int InfoCommand(const Options& options, bool codecs);
int ConfigShowCommand(const Options& options, std::span<const OptionOrigin> origins);

int RulesCheckCommand(const Options& options, const std::string& path);
int RulesShowCommand(const Options& options, const std::string& name);
int RulesGraphCommand(const Options& options, const std::string& path, bool dot);
int RulesPromelaCommand(const Options& options, const std::string& path);
int RulesSimulateCommand(const Options& options, const std::string& path);

int CtlCommand(const Options& options, const std::string& command, int64_t begin, int64_t end);
int TopCommand(const Options& options, bool once);
int DoctorCommand(const Options& options);

int LabExportCommand(const Options& options);
int LabStatsCommand(const Options& options);
int LabErrorCommand(const Options& options);
int LabQualityCommand(const Options& options);
int LabAnswersCommand(const Options& options);
int LabChoiceCommand(const Options& options);
int LabLatencyCommand(const Options& options);
int LabCapacityCommand(const Options& options);
int LabGrowthCommand(const Options& options);
int LabSweepCommand(const Options& options);
int LabReportCommand(const Options& options);
int LabStreamCommand(const Options& options);
int TuneCommand(const Options& options);

int BenchAttentionCommand(const Options& options);
int BenchModelCommand(const Options& options);
int BenchSharingCommand(const Options& options);
int BenchOverheadCommand(const Options& options);

int PrefixListCommand(const Options& options);
int PrefixPinCommand(const Options& options, int64_t id, bool off);
int PrefixRemoveCommand(const Options& options, const std::vector<int64_t>& ids);

int StoreStatsCommand(const Options& options);
int StoreVerifyCommand(const Options& options);
int StoreCompactCommand(const Options& options);
int StoreRemoveCommand(const Options& options, bool erase);

int BenchStoreCommand(const Options& options);

}  // namespace kvcell::cli
