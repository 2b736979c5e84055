// YAML files of one document: rules, and the options of the program.
#ifndef KVCELL_CELL_YAML_DOCUMENT_H_
#define KVCELL_CELL_YAML_DOCUMENT_H_

#include <yaml-cpp/yaml.h>

#include <string>

namespace kvcell {

// The document in `given`; null when there is none. Throws YAML::Exception (its mark says where) for what is no YAML,
// and where more follows the document. `YAML::LoadAll` is no way to find that out: it never ends on text such as ",a:
// b" (yaml-cpp 0.7).
YAML::Node LoadYamlDocument(const std::string& given);

}  // namespace kvcell

#endif  // KVCELL_CELL_YAML_DOCUMENT_H_
