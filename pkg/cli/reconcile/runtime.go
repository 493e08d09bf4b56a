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
	"github.com/podlace/podlace/pkg/store"
)

const (
	// maxCached is the size limit for files in the cache of libcni, which contain a configuration of up to this size.
	maxCached = 16 << 20
	// maxPidfile is the size limit for a file that contains a process ID and a newline.
	maxPidfile = 32
)

// Runtimes contains the running containers and pods that the container runtimes of this node report.
type Runtimes struct {
	Asked   []string        // sources that answered
	Running map[string]bool // running containers by ID
	Notes   []string        // sources that exist but did not answer
	pods    map[string]string
}

// taskFolders returns the folders that contain one entry for each running container. Containerd has one such folder for each of its own
// namespaces. In k3s, containerd uses other paths.
func taskFolders() []string {
	return []string{"/run/containerd/io.containerd.runtime.v2.task", "/run/k3s/containerd/io.containerd.runtime.v2.task"}
}

// storageFolder contains one folder for each container of CRI-O and podman. The folder of a container exists until the container is
// removed, whether the container runs or not.
const storageFolder = "/run/containers/storage/overlay-containers"

// crictlTimeout is the timeout of crictl. This timeout is long enough for a runtime that is just starting.
const crictlTimeout = 20 * time.Second

// AskRuntimes asks all sources on this node that know the running containers. A container counts as running if at least one source reports
// that it runs.
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

// readContainers reads a folder that contains one entry for each container. The last argument of readContainers is a function that gets the
// path of an entry and reports whether the container runs.
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

// mayRun reports whether a container with a folder in storageFolder may be running. If crictl reports the pod, mayRun returns the state
// that crictl reports. If crictl does not report the pod, mayRun checks whether the process of the container exists. A sandbox of CRI-O may
// have no pidfile. If crictl did not answer, a sandbox without a pidfile counts as running. If the pidfile of a container cannot be read,
// the container may be running.
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

// askCRI runs crictl. The configuration of crictl contains the socket of the runtime.
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

// CacheDir is libcni's cache. If a runtime uses this cache of libcni, the cache contains the data for the DEL of each attachment.
const CacheDir = "/var/lib/cni/results"

// The type cachedResult is an entry in the cache of libcni.
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

// A User is a file that names a plugin, without which no pod of this file can be deleted.
type User struct {
	File, Network, Plugin string
	Cached                bool // the file is in libcni's cache, with which some runtimes delete a running pod
}

// Users returns the files that name one of the given plugins: the configurations of the networks, and those in libcni's cache.
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

// Forget removes the attachments of a deleted network from the cache of libcni. Forget returns the paths of the removed files.
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
	if args["K8S_POD_NAME"] == "" {
		return ""
	}
	return args["K8S_POD_NAMESPACE"] + "/" + args["K8S_POD_NAME"]
}
