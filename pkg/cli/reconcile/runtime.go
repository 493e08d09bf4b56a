// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/child"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

const (
	// maxCached bounds files in libcni's cache, which contain a configuration of up to this size.
	maxCached = 16 << 20
	// maxPidfile bounds a file with a process ID and a newline.
	maxPidfile = 32
)

// Runtimes holds the running containers and pods that this node's runtimes report.
type Runtimes struct {
	Asked   []string        // sources that answered
	Running map[string]bool // running containers by ID
	Notes   []string        // sources that exist but did not answer
	pods    map[string]string
}

// taskFolders returns the folders with one entry for each running container: one for each of containerd's own namespaces, also at k3s'
// paths.
func taskFolders() []string {
	return []string{"/run/containerd/io.containerd.runtime.v2.task", "/run/k3s/containerd/io.containerd.runtime.v2.task"}
}

// storageFolder has a folder for each container of CRI-O and podman until it is removed, whether it runs or not.
const storageFolder = "/run/containers/storage/overlay-containers"

// crictlTimeout suffices for a runtime that is just starting.
const crictlTimeout = 20 * time.Second

// AskRuntimes asks all sources on this node for the running containers. One source that reports a container suffices.
func AskRuntimes() Runtimes {
	rt := Runtimes{Running: map[string]bool{}, pods: map[string]string{}}
	answered := false
	if path, err := exec.LookPath("crictl"); err == nil {
		if err := rt.askCRI(path); err != nil {
			rt.Notes = append(rt.Notes, fmt.Sprintf("crictl pods: %v", err))
		} else {
			rt.Asked, answered = append(rt.Asked, "crictl"), true
		}
	}
	for _, folder := range taskFolders() {
		rt.readContainers(folder, "/*/*", func(string) bool { return true })
	}
	rt.readContainers(storageFolder, "/*", func(path string) bool { return rt.mayRun(path, answered) })
	return rt
}

// readContainers reads a folder with one entry for each container. runs reports whether the container with the entry at a path runs.
func (rt *Runtimes) readContainers(folder, level string, runs func(path string) bool) {
	if _, err := os.ReadDir(folder); err != nil {
		return
	}
	rt.Asked = append(rt.Asked, folder)
	paths, _ := filepath.Glob(folder + level)
	for _, path := range paths {
		if runs(path) {
			rt.Running[filepath.Base(path)] = true
		}
	}
}

// mayRun reports whether a container with a folder in storageFolder may be running: what crictl says, or else whether its process exists. A
// sandbox of CRI-O may have no pidfile, and then counts as running if crictl did not answer. With an unreadable pidfile, a container may be
// running.
func (rt *Runtimes) mayRun(path string, answered bool) bool {
	if _, known := rt.pods[filepath.Base(path)]; known {
		return rt.Running[filepath.Base(path)]
	}
	text, err := store.ReadSmall(filepath.Join(path, "userdata/pidfile"), maxPidfile, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return !answered
	}
	pid, err2 := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || err2 != nil {
		return true
	}
	_, err = os.Stat(fmt.Sprintf("/proc/%d", pid))
	return !errors.Is(err, fs.ErrNotExist)
}

// askCRI runs crictl, whose configuration has the runtime's socket.
func (rt *Runtimes) askCRI(path string) error {
	var stdout, stderr child.Buffer
	cmd := exec.Command(path, "pods", "-o", "json")
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := child.Run(cmd, crictlTimeout, nil)
	if errors.Is(err, child.ErrTimeout) {
		return fmt.Errorf("no answer within %v", crictlTimeout)
	}
	if err != nil {
		first, _, _ := strings.Cut(strings.TrimSpace(stderr.String()), "\n")
		return fmt.Errorf("%w: %s", err, first)
	}
	var answer struct {
		Items *[]struct {
			ID       string `json:"id"`
			State    string `json:"state"`
			Metadata struct {
				Name      string `json:"name"`
				Namespace string `json:"namespace"`
			} `json:"metadata"`
		} `json:"items"`
	}
	if err := json.Unmarshal(stdout.Bytes(), &answer); err != nil {
		return err
	}
	if answer.Items == nil {
		return fmt.Errorf("the answer has no items")
	}
	for _, pod := range *answer.Items {
		rt.pods[pod.ID] = pod.Metadata.Namespace + "/" + pod.Metadata.Name
		if pod.State == "SANDBOX_READY" {
			rt.Running[pod.ID] = true
		}
	}
	return nil
}

// CacheDir is libcni's cache, which holds the data for DEL of each attachment if the runtime uses it.
const CacheDir = "/var/lib/cni/results"

// cachedResult is an entry in libcni's cache.
type cachedResult struct {
	Kind        string      `json:"kind"`
	ContainerID string      `json:"containerId"`
	IfName      string      `json:"ifName"`
	Network     string      `json:"networkName"`
	Netns       string      `json:"netns"`
	Args        [][2]string `json:"cniArgs"`
	Config      []byte      `json:"config"`

	path string
}

// User is a file that names a plugin without which no pod of this file can be deleted.
type User struct {
	File, Network, Plugin string
	Cached                bool // the file is in libcni's cache, with which some runtimes delete a running pod
}

// Users returns the files that name one of the plugins: configurations of networks, and those in libcni's cache.
func Users(networks []Network, plugins ...string) (users []User) {
	for _, n := range networks {
		for _, p := range n.Plugins {
			if slices.Contains(plugins, p.Type) {
				users = append(users, User{File: n.File, Network: n.Name, Plugin: p.Type})
			}
		}
	}
	type entry struct{ Type string }
	for _, c := range readCache() {
		var list struct {
			entry
			Plugins []entry
		}
		_ = json.Unmarshal(c.Config, &list) // what cannot be read names nothing
		for _, p := range append(list.Plugins, list.entry) {
			if slices.Contains(plugins, p.Type) {
				users = append(users, User{c.path, c.Network, p.Type, true})
			}
		}
	}
	return users
}

// readCache returns the readable entries of libcni's cache.
func readCache() (entries []cachedResult) {
	paths, _ := filepath.Glob(CacheDir + "/*")
	for _, path := range paths {
		c := cachedResult{path: path}
		if data, err := store.ReadSmall(path, maxCached, 0); err == nil && json.Unmarshal(data, &c) == nil && c.Kind == "cniCacheV1" {
			entries = append(entries, c)
		}
	}
	return entries
}

// Forget removes a deleted network's attachments from libcni's cache, and returns the paths of the files.
func Forget(network string) (removed []string) {
	for _, c := range readCache() {
		if c.Network == network && os.Remove(c.path) == nil {
			removed = append(removed, c.path)
		}
	}
	return removed
}

func (c cachedResult) pod() string {
	args := map[string]string{}
	for _, kv := range c.Args {
		args[kv[0]] = kv[1]
	}
	return plugin.Pod{Namespace: args["K8S_POD_NAMESPACE"], Name: args["K8S_POD_NAME"]}.String()
}
