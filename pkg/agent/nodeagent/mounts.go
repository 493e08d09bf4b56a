// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"fmt"
	"os"
	"strings"

	"github.com/podlace/podlace/pkg/store"
)

// deletedRoot is the suffix of a mount's root in /proc/self/mountinfo once the mounted folder was removed.
const deletedRoot = "//deleted"

// mountRoots returns the root of the mount at each path, which is the mounted folder's path inside its file system. It omits paths that are
// no mount points: if their folder is removed, the agent can create it again.
func mountRoots(paths ...string) map[string]string {
	roots := map[string]string{}
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return roots
	}
	unescape := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line) // see proc_pid_mountinfo(5): 3 is the root, 4 the mount point
		if len(fields) < 5 {
			continue
		}
		for _, path := range paths {
			if path != "" && unescape.Replace(fields[4]) == path {
				roots[path] = fields[3] // the last mount covers earlier ones
			}
		}
	}
	return roots
}

func (a *agent) folders() []string { return []string{a.config.BinDir, a.config.ConfDir, store.Root} }

// orphaned returns an error if a mounted folder of the node was removed or moved. The container's mount then still leads to the old folder,
// which no other program sees; only a new container gets the current one.
func (a *agent) orphaned() error {
	now := mountRoots(a.folders()...)
	for _, path := range a.folders() {
		before, mounted := a.roots[path]
		if root, ok := now[path]; mounted && ok && root != before {
			return fmt.Errorf("the folder %s of the node was removed or moved (%s, before %s): this process ends, so that its container "+
				"restarts with the present folder", path, root, before)
		}
	}
	return nil
}

// checkOrphans reports each mounted folder that was removed before this process started.
func (a *agent) checkOrphans() {
	for _, path := range a.folders() {
		if strings.HasSuffix(a.roots[path], deletedRoot) {
			a.addProblem("folder", fmt.Errorf("the folder %s of the node was removed, but this container still has it mounted", path),
				"delete this pod: the new one mounts the present folder", true)
		}
	}
}
