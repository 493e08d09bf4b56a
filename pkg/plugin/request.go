// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"io"
	"log/slog"
	"os"
	"reflect"
	"time"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/plugins/pkg/ns"
)

// Pod is the identity of the pod as Kubernetes runtimes pass it in CNI_ARGS; all fields may be empty.
type Pod struct{ Namespace, Name, UID string }

// String returns namespace/name, or "" when the runtime named no pod.
func (p Pod) String() string {
	if p.Name == "" {
		return ""
	}
	return p.Namespace + "/" + p.Name
}

// Attachment names one interface of one container (SPEC.md, "cni.dev/valid-attachments").
type Attachment struct {
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifname"`
}

// Request is one call of a plugin, validated: what a verb gets to work on.
type Request struct {
	Plugin string // name of the plugin, as in the configuration's "type"
	Verb   string // ADD, DEL, CHECK, GC or STATUS

	Network     string            // "name" of the network configuration
	ContainerID string            // CNI_CONTAINERID
	IfName      string            // CNI_IFNAME
	NetnsPath   string            // CNI_NETNS, verbatim
	Netns       ns.NetNS          // the open namespace; nil on DEL when there is none any more
	Args        map[string]string // CNI_ARGS
	Path        []string          // CNI_PATH
	Pod         Pod

	CNIVersion string              // version of the configuration, and so of the result
	Config     []byte              // the configuration as it came on stdin
	Prev       *types100.Result    // prevResult; nil when there is none
	prev       []byte              // as it came, if it is in the version of the result
	Valid      map[Attachment]bool // GC: the attachments to keep
	Dead       map[Attachment]bool // GC: the only ones to collect; nil when nobody named them

	Reclaimed func(Attachment) // ADD: called by an IPAM plugin in process that found an attachment dead and took its addresses

	NotAfter time.Time // DEL, for an IPAM plugin in process: when what is to go was made at the latest; zero for whenever

	Hold *os.File // the lock of the attachment, which child processes inherit; nil when there is none

	Log    *slog.Logger // carries the identity of the pod
	began  time.Time    // of this call
	spared bool         // GC: Valid holds more than the runtime's list

	once map[reflect.Type]any // what Once keeps; copies of the request share it

	log     io.Writer // where Log writes
	logFile *os.File  // if that is a file, and not stderr
	level   slog.Level

	listen    func() <-chan os.Signal
	listening chan struct{}    // closed when there is an end
	end       <-chan os.Signal // signals that ask the process to end
}

// Once returns what do returns. It calls do once for each type in a request that Main made and its copies.
func Once[T any](r *Request, do func() T) T {
	kind := reflect.TypeFor[T]()
	if value, ok := r.once[kind].(T); ok {
		return value
	}
	value := do()
	if r.once != nil {
		r.once[kind] = value
	}
	return value
}

// Attachment returns the interface that this request is about.
func (r *Request) Attachment() Attachment {
	return Attachment{ContainerID: r.ContainerID, IfName: r.IfName}
}

func (r *Request) close() {
	if r.Netns != nil {
		r.Netns.Close()
	}
	if r.logFile != nil {
		r.logFile.Close()
	}
}
