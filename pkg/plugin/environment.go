// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// maxID is the maximum length of container IDs and network names in bytes, because they are parts of file names, which have at most 255.
const maxID = 255

// requiredVariables returns the environment variables that a CNI operation requires (SPEC.md section 2 "CNI operations"). ADD, CHECK and
// DEL need no CNI_PATH unless the plugin calls another one.
func requiredVariables(verb string) []string {
	switch verb {
	case "ADD", "CHECK":
		return []string{"CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"}
	case "DEL":
		return []string{"CNI_CONTAINERID", "CNI_IFNAME"}
	case "GC":
		return []string{"CNI_PATH"}
	}
	return nil
}

func (r *Request) readEnvironment(getenv func(string) string) error {
	var missing []string
	for _, name := range requiredVariables(r.Verb) {
		if getenv(name) == "" {
			missing = append(missing, name)
		}
	}
	r.ContainerID, r.IfName, r.NetnsPath = getenv("CNI_CONTAINERID"), getenv("CNI_IFNAME"), getenv("CNI_NETNS")
	r.Path = slices.DeleteFunc(filepath.SplitList(getenv("CNI_PATH")), func(dir string) bool { return dir == "" })
	r.Args = parseArgs(getenv("CNI_ARGS"))
	r.trace = readTrace(getenv, r.Args)
	r.Pod = Pod{Namespace: r.Args["K8S_POD_NAMESPACE"], Name: r.Args["K8S_POD_NAME"], UID: r.Args["K8S_POD_UID"]}
	if len(missing) > 0 {
		return Errorf(CodeEnvironment, "required environment variables missing: %s", strings.Join(missing, ", "))
	}
	if r.Verb == "GC" || r.Verb == "STATUS" {
		return nil
	}
	if err := validID(r.ContainerID); err != nil {
		return Errorf(CodeEnvironment, "CNI_CONTAINERID %s: %w", quote(r.ContainerID), err)
	}
	if err := ValidIfName(r.IfName); err != nil {
		return Errorf(CodeEnvironment, "CNI_IFNAME %s: %w", quote(r.IfName), err)
	}
	return nil
}

// validID returns an error if s is not a valid container ID or network name (SPEC.md).
func validID(s string) error {
	switch {
	case s == "":
		return fmt.Errorf("must not be empty")
	case len(s) > maxID:
		return fmt.Errorf("%d characters, want at most %d", len(s), maxID)
	}
	for i := range len(s) {
		if !isAlnum(s[i]) && (i == 0 || !strings.ContainsRune("_.-", rune(s[i]))) {
			return fmt.Errorf("want a letter or digit, then letters, digits, '_', '.' or '-'")
		}
	}
	return nil
}

func isAlnum(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z'
}

// ValidIfName returns an error for a name that the kernel rejects (net/core/dev.c dev_valid_name), for one with "%", because the kernel
// replaces "%d" with a number, and for "all" and "default", which have a special meaning below /proc/sys/net/ipv4/conf.
func ValidIfName(s string) error {
	switch {
	case s == "":
		return fmt.Errorf("must not be empty")
	case len(s) > 15:
		return fmt.Errorf("%d bytes, want at most 15", len(s))
	case s == "." || s == ".." || s == "all" || s == "default":
		return fmt.Errorf("the name is reserved")
	case s[0] == '-':
		return fmt.Errorf("must not begin with '-'")
	case !utf8.ValidString(s):
		return fmt.Errorf("want UTF-8, as in the result")
	}
	for _, c := range s {
		if c == '/' || c == ':' || c == '%' || unicode.IsSpace(c) || !unicode.IsPrint(c) {
			return fmt.Errorf("character %q is not allowed", c)
		}
	}
	return nil
}

// parseArgs parses CNI_ARGS of the form "K=V;K=V", where a value may contain '='. It ignores malformed arguments, which must not stop DEL;
// checkArgs reports them.
func parseArgs(s string) map[string]string {
	args := map[string]string{}
	for pair := range strings.SplitSeq(s, ";") {
		if k, v, ok := strings.Cut(pair, "="); ok {
			args[k] = v
		}
	}
	return args
}

// checkArgs returns an error for malformed arguments, and for unknown keys unless IgnoreUnknown is set (CONVENTIONS.md, CNI_ARGS).
func checkArgs(s string, args map[string]string) error {
	switch strings.ToLower(args["IgnoreUnknown"]) {
	case "1", "true", "t":
		return nil
	}
	for pair := range strings.SplitSeq(s, ";") {
		k, _, ok := strings.Cut(pair, "=")
		switch {
		case pair == "":
		case !ok:
			return Errorf(CodeEnvironment, "CNI_ARGS: %s: want KEY=VALUE", quote(pair))
		case k != "IgnoreUnknown" && k != "MAC" && k != "IP" && k != traceArg && !strings.HasPrefix(k, "K8S_POD_"):
			return WithHint(Errorf(CodeEnvironment, "CNI_ARGS: unknown key %s", quote(k)), "add IgnoreUnknown=1 to accept it")
		}
	}
	return nil
}

// quote makes an external string safe for logs: in quotation marks, escaped and truncated.
func quote(s string) string {
	const most = 80
	if len(s) > most {
		s = s[:most] + "..."
	}
	return fmt.Sprintf("%+q", s)
}
