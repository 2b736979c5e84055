#include "cell/yaml_document.h"

#include <yaml-cpp/depthguard.h>
#include <yaml-cpp/eventhandler.h>

#include <algorithm>
#include <sstream>

namespace kvcell {
namespace {

// Keeps where a document starts; what is in it comes as nodes.
class StartOfDocument : public YAML::EventHandler {
 public:
  void OnDocumentStart(const YAML::Mark& mark) override { mark_ = mark; }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t, const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {}
  void OnMapEnd() override {}

  const YAML::Mark& mark() const { return mark_; }

 private:
  YAML::Mark mark_;
};

}  // namespace

YAML::Node LoadYamlDocument(const std::string& given) {
  const auto line_at = [&](size_t at) {
    YAML::Mark mark;
    mark.line = static_cast<int>(std::count(given.begin(), given.begin() + static_cast<std::ptrdiff_t>(at), '\n'));
    return mark;
  };
  if (const size_t at = given.find('\0'); at != std::string::npos) {
    throw YAML::ParserException(line_at(at), "this is no text: it holds a byte that is 0; is it the right file?");
  }
  // Before a line's end yaml-cpp 0.7 takes the file's end for that of a quoted text that has none.
  const std::string text = given.substr(0, given.find_last_not_of(" \t\r\n") + 1);
  std::istringstream stream(text);
  YAML::Parser parser(stream);
  StartOfDocument start;
  bool more = false;
  try {
    more = parser.HandleNextDocument(start) && parser.HandleNextDocument(start);
  } catch (const YAML::DeepRecursion& error) {
    throw YAML::ParserException(error.mark, "lists and maps lie too deep in one another here; is it the right file?");
  }
  if (more) {
    throw YAML::ParserException(start.mark(),
                                "a second document begins here; a file holds one, so take out the `---`, or a stray "
                                "character here");
  }
  return YAML::Load(text);
}

}  // namespace kvcell
