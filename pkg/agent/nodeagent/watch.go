// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/wait"
	kwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/podlace/podlace/pkg/agent/noderoutes"
	"github.com/podlace/podlace/pkg/daemon/probes"
	"github.com/podlace/podlace/pkg/plugin"
)

// pageSize is the number of nodes in a page of a list, of about 14 kB each, and of several times that with many images. Pages are used only
// if the API server cannot stream lists (WatchList).
const pageSize = 100

// firstRetry and lastRetry are the shortest and longest delay before a retry of a watch, which jitter can double. client-go's default of up
// to a minute is too long, because new nodes get no routes until the watch works again.
const (
	firstRetry = 800 * time.Millisecond
	lastRetry  = 15 * time.Second
)

// watchTimeout is the silence after which a watch counts as lost. Normally a bookmark comes each minute.
const watchTimeout = 10 * time.Minute

// nodes is the store of a client-go reflector. It keeps only the fields that affect routes and calls changed only for these, because each
// kubelet updates its Node object every few minutes.
type nodes struct {
	changed func()
	log     *slog.Logger

	mu        sync.Mutex
	byName    map[string]noderoutes.Node
	complete  bool      // a complete list was received once
	lastEvent time.Time // time of the last event
	since     time.Time // time of the first change that list has not returned yet
	failure   string    // why no events come; empty: the watch works
	denied    bool      // the API server answers, and denies the agent access
}

func newNodes(changed func(), log *slog.Logger) *nodes {
	return &nodes{changed: changed, log: log, byName: map[string]noderoutes.Node{}, lastEvent: time.Now()}
}

// list returns the nodes sorted by name, the time of the first change since the previous call or zero, and false until a complete list was
// received.
func (n *nodes) list() (list []noderoutes.Node, since time.Time, complete bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(n.byName)) {
		list = append(list, n.byName[name])
	}
	since, n.since = n.since, time.Time{}
	return list, since, n.complete
}

// boot returns the ID of a node's boot, and whether the node is Ready.
func (n *nodes) boot(name string) (id string, ready bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.byName[name].Boot, n.byName[name].Ready
}

// advice returns what an administrator can do about the failure of the watch.
func (n *nodes) advice() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.denied {
		return "apply the manifest or upgrade the chart again, to restore the ServiceAccount, ClusterRole and ClusterRoleBinding " +
			"podlace-node; existing routes stay"
	}
	return "routes stay; the agent applies changes of the cluster when the API server answers"
}

// watched returns the time of the last event, and why no more arrive or "".
func (n *nodes) watched() (heard time.Time, failure string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.failure == "" && time.Since(n.lastEvent) > watchTimeout {
		return n.lastEvent, "the API server is silent"
	}
	return n.lastEvent, n.failure
}

// changeNodes calls change, which reports whether a field that affects routes changed, and records that the watch works.
func (n *nodes) changeNodes(change func() bool) {
	n.mu.Lock()
	recovered := n.failure != ""
	n.lastEvent, n.failure = time.Now(), ""
	other := change()
	if other && n.since.IsZero() {
		n.since = time.Now()
	}
	n.mu.Unlock()
	if recovered {
		n.log.Info("the nodes of the cluster are watched again")
	}
	if other || recovered {
		n.changed()
	}
}

// failed records why no events come, and logs it if the watch worked before.
func (n *nodes) failed(err error) {
	n.mu.Lock()
	news := n.failure == ""
	n.failure, n.denied = err.Error(), apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err)
	n.mu.Unlock()
	if news {
		n.log.Warn("the nodes of the cluster are not watched: routes stay as they are until the API server answers", "error", err)
		n.changed()
	}
}

// Add implements cache.TransformingStore.
func (n *nodes) Add(object any) error { return n.Update(object) }

// Update implements cache.TransformingStore.
func (n *nodes) Update(object any) error {
	node, err := readNode(object)
	if err == nil {
		n.changeNodes(func() bool { return n.keep(node) })
	}
	return err
}

func (n *nodes) keep(node noderoutes.Node) (other bool) {
	before, ok := n.byName[node.Name]
	n.byName[node.Name] = node
	return !ok || !sameNode(before, node)
}

func sameNode(a, b noderoutes.Node) bool {
	return a.UID == b.UID && a.Created.Equal(b.Created) && slices.Equal(a.PodCIDRs, b.PodCIDRs) && slices.Equal(a.Addresses, b.Addresses)
}

// Delete implements cache.TransformingStore. It is a no-op if a new object with the same name exists.
func (n *nodes) Delete(object any) error {
	node, err := readNode(object)
	if err == nil {
		n.changeNodes(func() bool {
			now, ok := n.byName[node.Name]
			if !ok || now.UID != node.UID {
				return false
			}
			delete(n.byName, node.Name)
			return true
		})
	}
	return err
}

// Replace implements cache.TransformingStore. It stores a complete list of nodes.
func (n *nodes) Replace(objects []any, _ string) error {
	list := make([]noderoutes.Node, 0, len(objects))
	for _, object := range objects {
		node, err := readNode(object)
		if err != nil {
			return err
		}
		list = append(list, node)
	}
	n.changeNodes(func() (other bool) {
		before := n.byName
		n.byName = make(map[string]noderoutes.Node, len(list))
		for _, node := range list {
			n.byName[node.Name] = node
		}
		other = !n.complete || !maps.EqualFunc(before, n.byName, sameNode)
		n.complete = true
		return other
	})
	return nil
}

// Bookmark implements cache.ReflectorBookmarkStore. A bookmark proves that the connection still works.
func (n *nodes) Bookmark(string) error {
	n.changeNodes(func() bool { return false })
	return nil
}

// Resync implements cache.TransformingStore. It does nothing, because the agent itself compares the kernel periodically.
func (n *nodes) Resync() error { return nil }

// Transformer implements cache.TransformingStore. The function reduces streamed objects to the fields that the store keeps.
func (n *nodes) Transformer() cache.TransformFunc {
	return func(object any) (any, error) { return readNode(object) }
}

// readNode returns the fields of a Node object that affect routes. A noderoutes.Node is returned as it is.
func readNode(object any) (noderoutes.Node, error) {
	switch o := object.(type) {
	case noderoutes.Node:
		return o, nil
	case *corev1.Node:
		n := noderoutes.Node{Name: o.Name, UID: string(o.UID), Created: o.CreationTimestamp.Time, PodCIDRs: o.Spec.PodCIDRs}
		if len(n.PodCIDRs) == 0 && o.Spec.PodCIDR != "" {
			n.PodCIDRs = []string{o.Spec.PodCIDR}
		}
		n.Boot, n.Ready = o.Status.NodeInfo.BootID, slices.ContainsFunc(o.Status.Conditions, isReady)
		for _, a := range o.Status.Addresses {
			if a.Type == corev1.NodeInternalIP {
				n.Addresses = append(n.Addresses, a.Address)
			}
		}
		return n, nil
	}
	return noderoutes.Node{}, fmt.Errorf("got a %T, want a Node", object)
}

func isReady(c corev1.NodeCondition) bool {
	return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
}

// client returns a client for the API server, which uses the ServiceAccount of the pod if kubeconfig is "".
func client(kubeconfig, server string, connections *connections) (*rest.RESTClient, error) {
	c, err := rest.InClusterConfig()
	if kubeconfig != "" {
		c, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	} else if errors.Is(err, rest.ErrNotInCluster) {
		err = errors.New("this is not a pod of a cluster: name a kubeconfig by --kubeconfig")
	}
	if err != nil {
		return nil, fmt.Errorf("configuration of the API client: %w", err)
	}
	if server != "" {
		c.Host = server
	}
	c.Dial = connections.dial
	c.Wrap(probes.LimitAnswers)
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, corev1.SchemeGroupVersion)
	scheme.AddKnownTypes(corev1.SchemeGroupVersion, &corev1.Node{}, &corev1.NodeList{}, &corev1.Event{})
	group := corev1.SchemeGroupVersion
	c.GroupVersion, c.APIPath, c.NegotiatedSerializer = &group, "/api", serializer.NewCodecFactory(scheme).WithoutConversion()
	c.ContentType, c.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	c.UserAgent = "podlace-node/" + plugin.BuildVersion()
	r, err := rest.RESTClientFor(c)
	if err != nil {
		return nil, fmt.Errorf("client of the API server: %w", err)
	}
	return r, nil
}

// watchNodes updates n from the API server until ctx is done. It reads the first list as a stream if the server can (WatchList), and in
// pages otherwise.
func watchNodes(ctx context.Context, c rest.Interface, n *nodes) {
	from := cache.NewFilteredListWatchFromClient(c, "nodes", metav1.NamespaceAll, func(*metav1.ListOptions) {})
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			// With version 0, the API server sends all nodes at once. With a limit and another version, it sends exactly this version,
			// whose watch it refuses after a restart, so a list of the same version would follow until etcd removes it.
			options.ResourceVersion = ""
			object, err := from.ListWithContext(ctx, options)
			if err != nil {
				n.failed(err)
			} else if all, ok := object.(*corev1.NodeList); ok {
				for i := range all.Items { // all pages are in memory until the last one arrives
					all.Items[i] = trim(&all.Items[i])
				}
			}
			return object, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (kwatch.Interface, error) {
			w, err := from.WatchWithContext(ctx, options)
			switch {
			case err == nil && options.SendInitialEvents == nil: // a watch may be without events for a minute
				n.changeNodes(func() bool { return false })
			case apierrors.IsGone(err), apierrors.IsResourceExpired(err): // a list follows
			case options.SendInitialEvents != nil && (apierrors.IsInvalid(err) || apierrors.IsBadRequest(err)):
				n.log.Debug("the API server cannot stream lists: reading pages", "error", err)
			case err != nil:
				n.failed(err)
			}
			return w, err
		},
	}
	quiet := logr.Discard() // its messages are logged above
	retry := &wait.Backoff{Duration: firstRetry, Factor: 2, Jitter: 1, Cap: lastRetry, Steps: int(lastRetry / firstRetry)}
	r := cache.NewReflectorWithOptions(lw, &corev1.Node{}, n, cache.ReflectorOptions{Name: "nodes", Logger: &quiet, Backoff: retry})
	r.WatchListPageSize = pageSize
	r.RunWithContext(klog.NewContext(ctx, quiet))
}

// trim returns a copy of a Node object with only the fields that the agent uses.
func trim(o *corev1.Node) corev1.Node {
	t := corev1.Node{Spec: corev1.NodeSpec{PodCIDR: o.Spec.PodCIDR, PodCIDRs: o.Spec.PodCIDRs}}
	t.Name, t.UID, t.CreationTimestamp, t.ResourceVersion = o.Name, o.UID, o.CreationTimestamp, o.ResourceVersion
	t.Status.NodeInfo.BootID = o.Status.NodeInfo.BootID
	for _, c := range o.Status.Conditions {
		if isReady(c) {
			t.Status.Conditions = append(t.Status.Conditions, c)
		}
	}
	for _, a := range o.Status.Addresses {
		if a.Type == corev1.NodeInternalIP {
			t.Status.Addresses = append(t.Status.Addresses, a)
		}
	}
	return t
}
