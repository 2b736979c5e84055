#include "cell/yaml_document.h"

#include <yaml-cpp/eventhandler.h>

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

YAML::Node LoadYamlDocument(const std::string& text) {
  std::istringstream stream(text);
  YAML::Parser parser(stream);
  StartOfDocument start;
  if (parser.HandleNextDocument(start) && parser.HandleNextDocument(start)) {
    throw YAML::ParserException(start.mark(),
                                "a second document begins here; a file holds one, so take out the `---`, or a stray "
                                "character here");
  }
  return YAML::Load(text);
}

}  // namespace kvcell
