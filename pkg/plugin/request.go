// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"io"
	"log/slog"
	"net/netip"
	"os"
	"reflect"
	"time"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/plugins/pkg/ns"
)

// Pod is the identity of a pod, which Kubernetes runtimes pass in CNI_ARGS. All fields may be empty.
type Pod struct{ Namespace, Name, UID string }

// String returns the pod as namespace/name, or as name without a namespace, or "" if the runtime passed no name.
func (p Pod) String() string {
	if p.Name == "" || p.Namespace == "" {
		return p.Name
	}
	return p.Namespace + "/" + p.Name
}

// Attachment identifies one interface of one container (SPEC.md, "cni.dev/valid-attachments").
type Attachment struct {
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifname"`
}

// Request contains the validated input of one plugin call.
type Request struct {
	Plugin string // name of the plugin, as in the configuration's "type"
	Verb   string // ADD, DEL, CHECK, GC or STATUS

	Network     string            // "name" of the network configuration
	ContainerID string            // CNI_CONTAINERID
	IfName      string            // CNI_IFNAME
	NetnsPath   string            // CNI_NETNS, unchanged
	Netns       ns.NetNS          // the open namespace; nil on DEL if there is none anymore
	Args        map[string]string // CNI_ARGS
	Path        []string          // CNI_PATH
	Pod         Pod

	CNIVersion string              // version of the configuration and of the result
	Config     []byte              // the configuration from stdin, unchanged
	Prev       *types100.Result    // prevResult; nil if there is none
	prev       []byte              // prevResult unchanged, if it has the result's version
	Valid      map[Attachment]bool // GC: the attachments to keep
	Dead       map[Attachment]bool // GC: the only attachments to collect; nil if the caller did not name them

	// DEL of an in-process IPAM plugin:
	Leased   []netip.Prefix // the addresses in the main plugin's record
	NotAfter time.Time      // releases only leases made before this time; zero for all

	LockFile *os.File // lock file of the attachment, which child processes inherit; nil if there is none

	Log    *slog.Logger // adds the pod's identity to each line
	began  time.Time    // start of this call
	listed int          // GC: the length of the runtime's list, to which GC may add in Valid

	once map[reflect.Type]any // results of Once, shared with copies of the request

	log     io.Writer // where Log writes, unless it is journal
	journal *journal
	logTo   io.Closer // file or journal that the log goes to instead of stderr
	level   slog.Level
	trace   traceContext

	listen    func() <-chan os.Signal
	listening chan struct{}    // closed when end is set
	end       <-chan os.Signal // receives signals that request the end of the process
}

// Once calls a function once for each result type in a request and its copies, and then returns the stored result. In a request that Run
// did not create, it calls the function each time.
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

// AtEnd calls a function at the end of the request, after its result is written. Several run in the order of their AtEnd calls.
func (r *Request) AtEnd(do func()) {
	list := Once(r, func() *atEnd { return new(atEnd) })
	*list = append(*list, do)
}

type atEnd []func()

// Attachment returns the attachment of this request.
func (r *Request) Attachment() Attachment {
	return Attachment{ContainerID: r.ContainerID, IfName: r.IfName}
}

func (r *Request) close() {
	for _, do := range *Once(r, func() *atEnd { return new(atEnd) }) {
		do()
	}
	if r.Netns != nil {
		r.Netns.Close()
	}
	if r.logTo != nil {
		r.logTo.Close()
	}
}
