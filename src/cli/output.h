// What people see: tables, progress, warnings; and what scripts read: one JSON object.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvcell/status.h"

namespace kvcell::cli {

// Key order as written: a reader sees the important keys first.
using Json = nlohmann::ordered_json;

bool IsTerminal(std::FILE* stream);

// Prints without throwing, as fmt::print does where a write fails; FinishOutput tells of that once.
void Write(std::FILE* stream, std::string_view text);
template <typename... T>
void Print(std::FILE* stream, fmt::format_string<T...> format, T&&... args) {
  Write(stream, fmt::format(format, std::forward<T>(args)...));
}

// Prints the object on standard output, on one line; bytes that are no UTF-8 are replaced.
void PrintJson(const Json& object);
// The same to a file. kIoError.
Status WriteJsonFile(const std::string& path, const Json& object);
void PrintError(const Status& status);
void PrintWarning(std::string_view message);

// Rows of text cells. On a terminal: aligned columns under a header; in a pipe: tab-separated rows and nothing else.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : header_(std::move(header)) {}
  void Add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  // Numbers look better at the right: columns by their index.
  void AlignRight(std::vector<size_t> columns) { right_ = std::move(columns); }
  bool empty() const { return rows_.empty(); }
  void Print(std::FILE* stream) const;

 private:
  std::vector<std::string> header_;
  std::vector<std::vector<std::string>> rows_;
  std::vector<size_t> right_;
};

// A bar on standard error with rate and remaining time; silent where that is no terminal, or when not `wanted`.
class Progress {
 public:
  Progress(std::string what, bool wanted);
  ~Progress() { Clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void Show(int64_t done, int64_t total);
  void Clear();

 private:
  std::string what_;
  bool active_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point start_;
};

// Makes descriptors 0 to 2 exist, so that no file of ours gets their number, and turns a closed pipe into a failed
// write.
void PrepareStandardStreams();
// True once something could not be written to standard output: nobody reads what is printed from now on.
bool OutputFailed();
// Ends the output: `code` where everything was written; else tells why not and gives 1, or 141 without a word for a
// reader that went away, as `head` does.
int FinishOutput(int code);

// How the process ends for a failure: 2 for a wrong request, 1 for everything else.
int ExitCode(const Status& status);

// Prints the failure and gives its exit code.
int Failed(const Status& status);

}  // namespace kvcell::cli
